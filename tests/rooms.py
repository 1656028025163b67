"""Navigation of a few rooms, in seconds: `decentjax train tests/rooms.py`."""

from tests.checkout import ROOT
from train.cli.load import load_file
from train.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    WorkersConfig,
)

navigate = load_file(ROOT / "examples" / "navigation" / "navigate.py", "config file")
config = Config(
    name="rooms",
    num_steps=10,
    task=navigate.NavigateTask(
        model=navigate.NavigatorConfig(channels=2, width=8),
        ppo=navigate.PPOConfig(epochs=2),
        environments=4,
        horizon=32,
        sizes=(7, 9),
        num_maps=12,
        num_held_out=6,
        per_map=4,
        num_eval_episodes=8,
    ),
    workers=WorkersConfig(num_workers=2),
    step=StepConfig(batch_per_worker=2),
    optimizer=OptimizerConfig(name="adam", warmup_steps=1, weight_decay=0.0),
    evaluation=EvaluationConfig(every_steps=5),
    checkpoint=CheckpointConfig(every_steps=6, num_kept=9),
    log=LogConfig(every_steps=1),
)
