"""What options of other programs are called here."""

# By option, what trainers, launchers and papers call it.
ELSEWHERE = {
    "--num-steps": "epochs num-epochs max-epochs max-steps steps iterations max-iters",
    "--seed": "random-seed rng-seed",
    "--hours": "time",
    "--run-dir": "output-dir out-dir out output save-dir log-dir logdir "
    "checkpoint-dir default-root-dir",
    "--auto-resume": "resume-from-checkpoint continue",
    "--init-from": "checkpoint-path ckpt-path pretrained model-name-or-path",
    "--task.data": "data dataset data-dir data-path dataset-name train-file",
    "--data.num-processes": "dataloader-num-workers num-data-workers num-proc",
    "--workers.num-workers": "workers num-workers nodes num-nodes nnodes world-size "
    "gpus num-gpus devices nproc nproc-per-node ranks",
    "--workers.workers-per-node": "gpus-per-node workers-per-host tasks-per-node",
    "--topology.name": "graph graphs",
    "--method": "algorithm strategy mode",
    "--step.batch-per-worker": "batch train-batch-size micro-batch-size "
    "per-device-train-batch-size per-device-batch-size",
    "--step.num-micro-batches": "gradient-accumulation-steps grad-accum "
    "grad-accum-steps accumulate-grad-batches micro-batches",
    "--task.model.compute-dtype": "dtype precision bf16 fp16 amp mixed-precision",
    "--task.model.num-layers": "n-layer n-layers num-hidden-layers depth",
    "--task.model.num-heads": "n-head n-heads num-attention-heads",
    "--task.model.width": "n-embd d-model hidden-size embed-dim",
    "--task.model.context": "block-size seq-len seq-length max-length context-length",
    "--task.model.vocabulary": "vocab-size",
    "--method.every-steps": "local-steps inner-steps sync-every tau",
    "--optimizer.name": "optimizer optim optimizer-type",
    "--optimizer.warmup-steps": "warmup num-warmup-steps lr-warmup-steps",
    "--optimizer.final-learning-rate": "min-lr final-lr eta-min",
    "--optimizer.decay": "scheduler schedule lr-scheduler lr-scheduler-type",
    "--optimizer.clip-norm": "clip grad-clip max-grad-norm clip-grad-norm "
    "gradient-clip-val",
    "--optimizer.b1": "beta1 adam-beta1 momentum",
    "--optimizer.b2": "beta2 adam-beta2",
    "--exchange.merge": "guard trimmed discount",
    "--on-step": "straggler straggler.kind straggler.seconds callbacks",
    "--log.every-steps": "log-every log-interval logging-steps log-every-n-steps",
    "--log.sinks": "logger wandb tensorboard mlflow prometheus report-to",
    "--evaluation.every-steps": "eval-every eval-interval eval-steps "
    "val-check-interval",
    "--checkpoint.every-steps": "save-every save-interval save-steps",
}
HERE = {name: option for option, names in ELSEWHERE.items() for name in names.split()}


def meant(option: str) -> str | None:
    """The option that another program calls so, alone or with a section.

    Examples:
      >>> from train.cli.meaning import meant
      >>> meant("--epochs"), meant("--optimizer.max-grad-norm")
      ('--num-steps', '--optimizer.clip-norm')
    """
    name = option.lstrip("-").partition("=")[0].replace("_", "-")
    return HERE.get(name) or HERE.get(name.rpartition(".")[2])
