"""The tasks: losses and scores against NumPy, shapes, and what bad input gets."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sacrebleu

from tests import tiny
from tests.changes import changed
from tests.trees import assert_close
from train.cli.config_json import from_fields, to_json
from train.config import Config, OptimizerConfig, StepConfig, TopologyConfig
from train.data.batches import say_once
from train.data.digit_images import read_digits
from train.data.pairs import make_corpus, ragged
from train.data.token_files import prepare_text
from train.data.vocabulary import train_vocabulary
from train.models.gpt import GPTConfig
from train.models.resnet import ResNetConfig
from train.models.transformer import TransformerConfig
from train.run.optimizers import build_schedule, optimizer_with
from train.run.scores import build_score
from train.tasks.classification import image_task, scores
from train.tasks.digits import DigitsTask, draw_wrong, nearest_neighbour
from train.tasks.imagenet import ImageNetTask
from train.tasks.numbers import NumbersTask
from train.tasks.sampling import Sampling
from train.tasks.stdlib import StdlibTask
from train.tasks.text import TextTask
from train.tasks.translation import (
    DecodingConfig,
    TranslationOptions,
    quality,
    translation,
)

NET = ResNetConfig(depth=8, width=4, in_channels=1, convolution="matmul")
TRANSFORMER = TransformerConfig(
    vocabulary=300, context=64, num_layers=1, num_heads=2, width=16, hidden=32
)
NUMBERS = changed(TRANSFORMER, vocabulary=384, context=256)
LINES = [
    ("one two three", "eins zwei drei"),
    ("two three four five", "zwei drei vier fünf"),
    ("six", "sechs"),
    ("seven and eight", "sieben und acht"),
]


@functools.cache
def corpus():
    words = [line for pair in LINES for line in pair]
    return make_corpus(
        train_vocabulary(words, 300),
        train=LINES * 20,
        validation=LINES[:3],
        test=LINES,
        max_tokens=14 + 2,
    )


@functools.cache
def toy(**changes):
    options = dict(
        model=TRANSFORMER,
        decoding=DecodingConfig(beams=2, extra_tokens=8, rows=3),
        num_shapes=2,
    )
    return translation(corpus, TranslationOptions(**{**options, **changes}))


@functools.cache
def digits(smoothing=0.1):
    return DigitsTask(model=NET, label_smoothing=smoothing).build()


def model_of(task):
    return _model_of(task.init)


@functools.cache
def _model_of(init):
    return jax.jit(init)(jax.random.key(0))


def softmax_log(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("task", "batch"),
    [
        (tiny.config.task, 3),
        (DigitsTask(model=NET), 3),
        (NumbersTask(model=NUMBERS, num_train=300), 256),
    ],
)
def test_a_batch_has_the_promised_structure(task, batch):
    made = task.build()
    promised = made.batch_shape(batch)
    came = made.steps(5, batch, 0, range(5))[0].arrays
    assert jax.tree.structure(came) == jax.tree.structure(promised)
    for a, b in zip(jax.tree.leaves(came), jax.tree.leaves(promised), strict=True):
        assert a.dtype == b.dtype
        assert a.ndim == b.ndim + 1
        assert a.shape[0] == 5
        if not isinstance(task, NumbersTask):
            assert a.shape[1:] == b.shape


def test_the_promised_shapes_of_images_are_those_of_the_crops():
    task = ImageNetTask(model=ResNetConfig(depth=18, num_classes=1000))
    shapes = task.build().batch_shape(4)
    assert shapes["image"].shape == (4, 176, 176, 3)
    assert shapes["image"].dtype == np.uint8
    assert shapes["label"].shape == (4,)


def test_scores_count_hits_among_the_first_and_the_first_five():
    random = np.random.default_rng(0)
    logits = random.normal(size=(500, 9)).astype(np.float32)
    labels = random.integers(0, 9, 500).astype(np.int32)
    labels[400:] = -1
    got = scores(jnp.asarray(logits), jnp.asarray(labels))
    order = np.argsort(-logits[:400], axis=1)
    top_5 = [label in row[:5] for label, row in zip(labels[:400], order, strict=True)]
    assert len({(order[:, k] == labels[:400]).sum() for k in range(5)}) == 5
    nats = -softmax_log(logits[:400])[np.arange(400), labels[:400]]
    assert int(got["top_1"][0]) == (order[:, 0] == labels[:400]).sum()
    assert int(got["top_5"][0]) == sum(top_5)
    np.testing.assert_allclose(got["loss"][0], nats.sum(), rtol=1e-5)
    assert {int(count) for _, count in got.values()} == {400}


@pytest.mark.slow
def test_an_image_is_judged_alike_whatever_stands_beside_it():
    task = digits()
    model, score_fn = model_of(task), jax.jit(task.score_fn)
    (held_out,) = task.validation()
    whole = score_fn(*model, jax.tree.map(lambda x: x[:3], held_out))
    alone = [
        score_fn(*model, jax.tree.map(lambda x, i=i: x[i : i + 1], held_out))
        for i in range(3)
    ]
    total = sum(float(part["loss"][0]) for part in alone)
    assert float(whole["loss"][0]) == pytest.approx(total, rel=1e-5)


def test_digits_are_learned_from_all_but_those_held_out():
    task = digits()
    train, held_out = read_digits()
    labels = task.steps(1, len(train), 0, [0])[0].arrays["label"][0]
    assert sorted(labels) == sorted(train["label"])
    (batch,) = task.validation()
    np.testing.assert_array_equal(batch["image"], held_out["image"])


def test_the_digits_that_are_drawn_are_those_misclassified():
    _, held_out = read_digits()
    logits = np.eye(10, dtype=np.float32)[held_out["label"]]
    assert draw_wrong(jnp.asarray(logits), held_out) == "0 of 359 wrong"
    logits[7] = np.roll(logits[7], 1)
    label = held_out["label"][7]
    shown = draw_wrong(jnp.asarray(logits), held_out)
    assert shown.startswith(
        f"1 of 359 wrong\na {label}, classified as {(label + 1) % 10}\n"
    )


@pytest.mark.slow
def test_images_are_normalised_to_learn_from_and_to_be_judged():
    (batch,) = digits().validation()
    batch = jax.tree.map(lambda x: x[:4], batch)
    doubled = {**batch, "image": 2 * batch["image"]}
    rest = {"image": None, "sample": None, "steps": None, "validation": None}
    plain = image_task(NET, 0.1, **rest)
    halving = image_task(NET, 0.1, normalise=lambda x: x / 2, **rest)
    model = model_of(plain)
    for name in ("loss_fn", "score_fn"):
        key = [jax.random.key(1)] * (name == "loss_fn")
        wanted = jax.jit(getattr(plain, name))(*model, batch, *key)
        got = jax.jit(getattr(halving, name))(*model, doubled, *key)
        assert_close(got, wanted, rtol=1e-5)


def test_a_model_of_nan_gets_nothing_right_but_by_chance():
    logits = jnp.full((20, 10), jnp.nan)
    got = scores(logits, jnp.full(20, 7))
    assert float(got["top_1"][0]) == 0


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_images_is_that_of_smoothed_labels(smoothing):
    task, plain = digits(smoothing), jax.jit(digits(0.0).loss_fn)
    batch = jax.tree.map(lambda x: x[0], task.steps(1, 6, 0, [0])[0].arrays)
    params, statistics = model_of(task)
    value_and_grad = jax.jit(jax.value_and_grad(task.loss_fn, has_aux=True))
    (loss, (moved, metrics)), grads = value_and_grad(params, statistics, batch, None)
    # The branches that start at zero leave a gradient to learn from.
    assert float(optax.tree.norm(grads)) > 0
    assert metrics == {}
    before, after = jax.tree.leaves(statistics), jax.tree.leaves(moved)
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    # The mean of the losses of all ten classes is the part of the smoothing.
    ones = [
        plain(params, statistics, {**batch, "label": np.full(6, k, np.int32)}, None)[0]
        for k in range(10)
    ]
    own, _ = plain(params, statistics, batch, None)
    expected = (1 - smoothing) * own + smoothing * np.mean(ones)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_nearest_neighbour_is_the_nearest():
    train, held_out = read_digits()
    hits = 0
    for digit in held_out[:20]:
        apart = train["image"].astype(np.float64) - digit["image"]
        nearest = np.square(apart).sum((1, 2, 3)).argmin()
        hits += train["label"][nearest] == digit["label"]
    assert nearest_neighbour(train, held_out[:20]) == hits / 20
    assert nearest_neighbour(train, train) == 1.0


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_translation_loss_is_smoothed_and_ignores_padding(smoothing):
    task = toy(model=changed(TRANSFORMER, dropout=0.0), label_smoothing=smoothing)
    params, _ = model_of(task)
    batch = jax.tree.map(lambda x: x[0], task.steps(1, 64, 0, [0])[0].arrays)
    loss_fn = jax.jit(task.loss_fn)
    (loss, weight), _ = loss_fn(params, (), batch, jax.random.key(0))
    longer = {name: np.pad(x, ((0, 1), (0, 2))) for name, x in batch.items()}
    (of_longer, of_as_many), _ = loss_fn(params, (), longer, jax.random.key(0))
    assert weight == of_as_many == (batch["target"][:, 1:] > 0).sum()
    np.testing.assert_allclose(of_longer, loss, rtol=1e-5)
    # Without smoothing it is what is evaluated.
    total, count = jax.jit(task.score_fn)(params, (), batch)["loss"]
    assert int(count) == (batch["target"][:, 1:] > 0).sum()
    if smoothing == 0:
        np.testing.assert_allclose(loss, total / count, rtol=1e-6)
    else:
        assert abs(float(loss) - float(total / count)) > 1e-4


def test_of_bytes_a_uniform_model_loses_eight_bits():
    task = tiny.config.task.build()
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    (score,) = build_score(task)([(nothing, ())])
    assert score == {"bits_per_byte": pytest.approx(8)}


@pytest.mark.slow
def test_a_held_out_score_is_the_mean_over_all_tokens():
    task = toy(model=changed(TRANSFORMER, dropout=0.0))
    params, _ = model_of(task)
    nats, count, score_fn = 0.0, 0, jax.jit(task.score_fn)
    for batch in task.validation():
        total, some = score_fn(params, (), batch)["loss"]
        nats, count = nats + float(total), count + int(some)
    data = corpus()
    assert count == sum(len(data.validation.target[i]) + 1 for i in range(3))
    other = jax.tree.map(jnp.zeros_like, params)
    score, of_other = build_score(task)([(params, ()), (other, ())])
    assert score["loss"] == pytest.approx(nats / count)
    assert of_other["loss"] == pytest.approx(np.log(300), rel=1e-5)


@pytest.mark.slow
def test_a_model_learns_to_translate_what_it_has_seen():
    task = toy(
        model=changed(TRANSFORMER, width=32, hidden=64, dropout=0.0),
        label_smoothing=0.0,
        num_shapes=1,  # Compiled once.
    )
    params, _ = model_of(task)
    optimizer = optax.adam(6e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            return task.loss_fn(params, (), batch, jax.random.key(0))[0]

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    steps = task.steps(1, 128, 0, [0])
    for t in range(100):
        batch = jax.tree.map(lambda x: x[0], steps[t].arrays)
        params, opt_state, _ = step(params, opt_state, batch)
    sources, references = map(list, zip(*LINES, strict=True))
    translations = task.generate(params, (), sources, Sampling())
    assert ["".join(pieces) for pieces in translations] == references
    assert task.judge(params, ())["bleu"] == pytest.approx(100)
    assert task.judge(params, ())["exact_match"] == 1
    shown = task.sample(params, ())
    assert "six\n  -> sechs\n     sechs" in shown


def test_quality_is_sacrebleus_and_the_share_of_exact_lines():
    made = ["the cat sat on the mat today", "a dog", "b"]
    wanted = ["the cat sat on the mat", "a dog", "c"]
    got = quality(made, wanted)
    assert got["bleu"] == sacrebleu.corpus_bleu(made, [wanted]).score
    assert got["chrf"] == sacrebleu.corpus_chrf(made, [wanted]).score
    assert got["exact_match"] == pytest.approx(1 / 3)


# A sentence with a number, its change, and sacrebleu's tokenizer for its script.
SCRIPTS = {
    "zh": ("今天我们第{}次去北京的大学图书馆看书学习。", "看书", "读书", "zh"),
    "zh with Latin": ("我们用PyTorch第{}次训练了一个新的模型。", "新的", "大的", "zh"),
    "ja": ("今日は{}回目に東京の図書館で本を読みました。", "本を", "紙を", "char"),
    "ko": ("오늘 우리는 {}번째로 도서관에서 책을 읽었습니다.", "책을", "글을", "char"),
    "th": ("วันนี้เราไปห้องสมุดครั้งที่ {} เพื่ออ่านหนังสือ", "วันนี้", "วันนั้", "char"),
    "ru": ("Сегодня мы в {} раз идём читать книги в зал.", "книги", "слова", "13a"),
    "en": ("Today we go for the {} time to the library in 北京.", "go", "come", "13a"),
    "digits": ("1 2 3 {} 5 6 7 8 9", "8", "9", "13a"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCRIPTS)
def test_words_are_those_of_the_script_and_the_score_says_so(case, caplog, monkeypatch):
    sentence, old, new, tokenizer = SCRIPTS[case]
    wanted = [sentence.format(i) for i in range(10)]
    made = [line.replace(old, new) for line in wanted]
    seen = []
    take = lambda *lines: seen.append(lines) or {}  # noqa: E731
    monkeypatch.setattr("train.tasks.translation.meteor", take)
    say_once.cache_clear()
    got = quality(made, wanted)
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"|tok:{tokenizer}|" in said.partition(", chrf nrefs:1|")[0]
    assert quality(wanted, wanted)["bleu"] == pytest.approx(100)
    if tokenizer == "13a":
        assert seen[0] == (made, wanted)
        assert got["bleu"] == sacrebleu.corpus_bleu(made, [wanted]).score
        return

    def apart(line):  # Each letter of the script a word; of Latin ones in Chinese none.
        return re.findall(r"[A-Za-z]+|\S" if tokenizer == "zh" else r"\S", line)

    spaced = [[" ".join(apart(line)) for line in side] for side in (made, wanted)]
    score = sacrebleu.corpus_bleu(spaced[0], [spaced[1]], tokenize="none").score
    assert got["bleu"] == pytest.approx(score)
    assert score > 60
    assert [list(map(str.split, side)) for side in seen[0]] == [
        [line.split() for line in side] for side in spaced
    ]


def test_a_line_that_is_too_long_to_translate_is_refused():
    task = toy()
    params, _ = model_of(task)
    encode = corpus().vocabulary.encode
    lines = ["a" * length for length in range(20)]
    fits, too_long = (
        next(line for line in lines if len(*encode([line])) == length)
        for length in (15, 16)  # And `</s>`, of 16.
    )
    assert len(task.generate(params, (), [fits], Sampling())) == 1
    with pytest.raises(ValueError, match="must be shorter than 16 tokens, got 16: aa"):
        task.generate(params, (), [too_long], Sampling())


def test_a_translation_is_not_drawn():
    with pytest.raises(ValueError, match="is searched for, not drawn"):
        toy().generate({}, (), ["one"], Sampling(top_k=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        toy(model=changed(TRANSFORMER, dropout=0.5)),
        StdlibTask(model=GPTConfig(context=8, width=16, dropout=0.5)).build(),
    ],
)
def test_dropout_differs_by_step_and_spares_evaluations(task):
    model = model_of(task)
    batch = jax.tree.map(lambda x: x[0], task.steps(1, 64, 0, [0])[0].arrays)
    loss_fn, score_fn = jax.jit(task.loss_fn), jax.jit(task.score_fn)
    results = [loss_fn(*model, batch, jax.random.key(k)) for k in (1, 2)]
    # Of text, the loss alone; of a translation, (loss, weight).
    losses = {float(jax.tree.leaves(result)[0]) for result in results}
    assert len(losses) == 2
    scored = task.validation()[0]
    totals = [score_fn(*model, scored) for _ in range(2)]
    (name,) = totals[0]
    assert float(totals[0][name][0]) == float(totals[1][name][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": changed(TRANSFORMER, vocabulary=260)}, "the model's vocabulary is"),
        ({"model": changed(TRANSFORMER, context=20)}, "the model's context is 20"),
    ],
)
def test_a_model_that_does_not_fit_the_corpus_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes).steps(2, 64, 0, range(2))


def test_a_corpus_of_another_vocabulary_is_refused():
    whole = corpus()
    known = len(whole.vocabulary)
    source = ragged([[5, known], *[[5, 6]] * (len(whole.train) - 1)])
    broken = changed(whole, train=dict(source=source))
    task = translation(lambda: broken, TranslationOptions(model=TRANSFORMER))
    message = (
        f"has a token {known}, and its vocabulary {known} tokens: prepare it again"
    )
    with pytest.raises(ValueError, match=message):
        task.steps(2, 64, 0, range(2))


def test_micro_batches_must_divide_the_rows():
    with pytest.raises(ValueError, match="16"):
        toy().steps(2, 64, 0, range(2), multiple_of=16)


def test_text_tokens_out_of_range_are_refused(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(8)]
    for i, file in enumerate(files):
        file.write_text(f"words and words and word {i}\n" * 50)
    out = tmp_path / "out"
    prepare_text(files, out, 300, held_out_share=0.5)
    (out / "vocabulary.json").unlink()  # Else the model knows as many.
    task = TextTask(data=str(out), model=GPTConfig(vocabulary=100, context=8))
    with pytest.raises(ValueError, match="vocabulary of 100"):
        task.build().steps(1, 1, 0, [0])


def test_too_few_classes_for_imagenet_are_refused():
    with pytest.raises(ValueError, match="1000 classes and 3 channels, the model 10"):
        ImageNetTask(model=ResNetConfig(depth=18, num_classes=10))


@pytest.mark.parametrize(
    "task",
    [
        tiny.config.task,
        DigitsTask(model=NET),
        NumbersTask(model=TRANSFORMER),
        TextTask(data="somewhere", model=GPTConfig()),
        ImageNetTask(model=ResNetConfig(depth=50, num_classes=1000)),
    ],
)
def test_a_config_comes_back_from_its_json(task):
    config = Config(
        name="x",
        num_steps=100,
        task=task,
        topology=TopologyConfig(name="ring"),
        step=StepConfig(xla_options=("xla_a=b", "xla_c=d")),
        optimizer=OptimizerConfig(
            clip_norm=None, warmup_steps=9, decay="steps", decay_steps=(60, 80)
        ),
    )
    assert from_fields(json.loads(to_json(config))) == config


@pytest.mark.parametrize("step", [0, 1, 5, 10, 11, 40, 1000])
def test_the_inverse_square_root_schedule_rises_then_decays(step):
    config = OptimizerConfig(
        learning_rate=2.0,
        initial_learning_rate=0.5,
        warmup_steps=10,
        decay="inverse_sqrt",
    )
    rising = 0.5 + 1.5 * step / 10
    expected = rising if step < 10 else 2.0 * (10 / max(step, 1)) ** 0.5
    got = build_schedule(config, num_steps=2000)(step)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_a_clip_norm_gradients_keep_their_size():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 1e3 * x, params)

    def second_moment(clip_norm):
        config = OptimizerConfig(clip_norm=clip_norm, name="adamw", warmup_steps=0)
        optimizer = optimizer_with(config, optax.constant_schedule(1.0))
        state = jax.jit(optimizer.init)(params)
        _, state = jax.jit(optimizer.update)(grads, state, params)
        floats = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
        return max(float(jnp.max(x)) for x in floats)

    assert second_moment(None) == pytest.approx(1e6 * 0.001, rel=1e-4)
    assert second_moment(1.0) < 1


@pytest.mark.slow
def test_weights_decay_and_norms_and_biases_do_not():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    params["convolution"] = jnp.ones((2, 2, 2))  # For muon no matrix.
    nothing = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "accum_adamw", "lion", "muon"):
        config = OptimizerConfig(name=name, weight_decay=0.5, clip_norm=None)
        optimizer = optimizer_with(config, optax.constant_schedule(0.1))
        updates, _ = optimizer.update(nothing, optimizer.init(params), params)
        np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
        np.testing.assert_allclose(updates["convolution"], -0.05, rtol=1e-6)
        np.testing.assert_array_equal(updates["bias"], 0)


def test_muon_turns_a_matrix_and_lion_takes_signs():
    """Of unit singular values, about, as the iteration is short; per worker, too."""
    random = np.random.default_rng(0)
    kernels = jnp.asarray(random.normal(size=(3, 6, 4)), jnp.float32)
    params = {"kernel": kernels, "bias": jnp.ones((3, 4))}
    steps = {}
    for name in ("muon", "lion"):
        config = OptimizerConfig(name=name, weight_decay=0.0, clip_norm=None)
        optimizer = optimizer_with(config, optax.constant_schedule(0.1))
        state = jax.vmap(optimizer.init)(params)
        steps[name], _ = jax.jit(jax.vmap(optimizer.update))(params, state, params)
    turned = -10 * np.asarray(steps["muon"]["kernel"])
    values = np.linalg.svd(turned, compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.4))
    # It keeps the directions: what a matrix turns into is a positive multiple of each.
    for got, of in zip(turned, np.asarray(kernels), strict=True):
        left, _, right = np.linalg.svd(of, full_matrices=False)
        inside = left.T @ got @ right.T
        np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-2)
        assert np.all(np.diag(inside) > 0)
    # NAdam's first step: 1 + b1 (1 - b1) / (1 - b1^2).
    first = 1 + 0.9 * 0.1 / (1 - 0.9**2)
    np.testing.assert_allclose(steps["muon"]["bias"], -0.1 * first, rtol=1e-4)
    np.testing.assert_allclose(steps["lion"]["kernel"], -0.1 * np.sign(kernels))


@pytest.mark.parametrize("name", ["adam", "accum_adam"])
def test_without_a_w_the_decay_is_a_part_of_the_gradient(name):
    params = {"kernel": 3 * jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 0.5 * x, params)
    config = OptimizerConfig(name=name, weight_decay=0.1, clip_norm=None)
    optimizer = optimizer_with(config, optax.constant_schedule(0.1))
    _, state = optimizer.update(grads, optimizer.init(params), params)
    wanted = {"kernel": 0.5 * 3 + 0.1 * 3, "bias": 0.5}
    moments = state[2][0]  # After the watch and the decay.
    got = moments.acc if name == "accum_adam" else moments.mu
    scale = 1 / config.accum_steps if name == "accum_adam" else 1 - config.b1
    for key, gradient in wanted.items():
        np.testing.assert_allclose(got[key], scale * gradient, rtol=1e-6)
