"""Translation by a Transformer: the part that the translation tasks share."""

import collections
import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from decentjax.process import phases
from train.data.batches import say_once
from train.data.by_length import length_steps, length_validation
from train.data.pairs import SPLITS, Corpus
from train.data.vocabulary import END, START
from train.fields import checked
from train.models.beam import beam_search
from train.models.sizes import MOST_EXAMPLES, check_positive
from train.models.transformer import Transformer, TransformerConfig
from train.tasks.meteor import meteor
from train.tasks.sampling import Sampling
from train.tasks.task import Amount, Headline, Task, Totals

# Sources are padded to a multiple of this, so that few shapes are compiled.
LENGTH_STEP = 16
NUM_SAMPLES = 4
WITHOUT_SPACES = (
    *("HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"),
)
TYPICAL_LENGTH = 32  # About the mean of WMT14's sentences, in tokens.


@checked
class DecodingConfig:
    """Options of the beam search.

    Args:
      beams: number of partial translations that are kept.
      length_penalty: power of the length that the score is divided by.
      extra_tokens: tokens that a translation may have more than its source.
      rows: sentences per batch.
    """

    beams: int = 4
    length_penalty: float = 0.6
    extra_tokens: int = 50
    rows: int = 32

    def __post_init__(self):
        names = "beams", "extra_tokens", "rows"
        check_positive(self, *names, most=MOST_EXAMPLES)
        if self.length_penalty < 0:
            raise ValueError(
                f"length_penalty must not be negative, got {self.length_penalty}"
            )


@checked
class TranslationOptions:
    """The options that the translation tasks share.

    Args:
      model: sizes of the Transformer.
      decoding: options of the beam search.
      label_smoothing: share of the target that is spread evenly over all tokens.
      num_shapes: largest number of batch shapes; each is compiled once per exchange.
    """

    model: TransformerConfig
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)
    label_smoothing: float = 0.1
    num_shapes: int = 32


def translation(read: Callable[[], Corpus], options: TranslationOptions) -> Task:
    """Returns the task of a corpus.

    The loss is the mean over a worker's target tokens of the cross-entropy with
    smoothed labels; the held-out loss, in nats per target token, is without smoothing.

    Args:
      read: returns the corpus; called once, when the data is first used.
      options: options of the task.
    """
    model, decoding = options.model, options.decoding
    # Read when first used, as a task is also built where its data is missing.
    corpus = functools.cache(lambda: _check_fit(read(), model, decoding))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    search = jax.jit(functools.partial(_search, graph, decoding))

    def translate(params: Any, lines: Sequence[str]) -> list[str]:
        return _translate(functools.partial(search, params), corpus(), decoding, lines)

    def judge(params: Any, _: Any) -> dict[str, float]:
        sources, references = zip(*corpus().test_lines, strict=True)
        return quality(translate(params, sources), references)

    def generate(
        params: Any, _: Any, lines: Sequence[str], sampling: Sampling
    ) -> list[list[str]]:
        if sampling != Sampling():
            raise ValueError(
                "a translation is searched for, not drawn, as task.decoding of the "
                "run's config says: leave out the options of sampling"
            )
        _check_lengths(corpus(), lines)
        return [[text] for text in translate(params, lines)]

    def sample(params: Any, _: Any) -> str:
        sources, references = zip(*corpus().test_lines[:NUM_SAMPLES], strict=True)
        shown = zip(sources, translate(params, sources), references, strict=True)
        return "\n".join(f"{s}\n  -> {t}\n     {r}" for s, t, r in shown)

    return Task(
        batch_shape=_typical_batch,
        steps=lambda *args, **kwargs: length_steps(
            corpus().train, *args, num_shapes=options.num_shapes, **kwargs
        ),
        init=lambda key: (nnx.state(Transformer(model, rngs=nnx.Rngs(key))), ()),
        loss_fn=functools.partial(_loss_fn, graph, options.label_smoothing),
        validation=lambda: length_validation(corpus().validation, decoding.rows),
        score_fn=functools.partial(_score_fn, graph),
        headline=Headline("loss", better="lower"),
        sample=sample,
        generate=generate,
        judge=judge,
        units={"loss": "nats", "exact_match": "share"},
        # Of the targets, after `<s>`; padding is 0.
        amount=Amount("tokens", lambda x: int((x["target"][..., 1:] > 0).sum())),
        num_examples=lambda: len(corpus().train),
    )


def quality(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns BLEU and chrF by sacrebleu, METEOR where it is available.

    Also the share of the translations that equal their references. BLEU and METEOR are
    of words, see `word_tokenizer`; a message has sacrebleu's signatures.
    """
    from sacrebleu.metrics.bleu import BLEU  # Of the extra `text`.
    from sacrebleu.metrics.chrf import CHRF

    tokenizer = word_tokenizer(references)
    bleu, chrf = BLEU(tokenize=tokenizer), CHRF()
    exact = [a == b for a, b in zip(translations, references, strict=True)]
    found = {
        "exact_match": float(np.mean(exact)),
        "bleu": bleu.corpus_score(translations, [references]).score,
        "chrf": chrf.corpus_score(translations, [references]).score,
    }
    say_once(f"bleu is {bleu.get_signature()}, chrf {chrf.get_signature()}")
    lines = translations, references
    if tokenizer != "13a":  # METEOR's words are between spaces.
        lines = [list(map(bleu.tokenizer, side)) for side in lines]
    return found | meteor(*lines)


def word_tokenizer(lines: Iterable[str]) -> str:
    """Returns sacrebleu's tokenizer for the script of a language.

    "zh", each Chinese character a word, for Chinese; "char", any character, for other
    scripts without spaces between words, and for Korean, whose words are long; else
    "13a", words and punctuation, the default of papers. The tokenizers "ja-mecab" and
    "ko-mecab" need packages of their own.
    """
    # The name of a character begins with that of its script.
    scripts = collections.Counter(
        unicodedata.name(x, "").partition(" ")[0]
        for line in lines
        for x in line
        if x.isalpha()
    )
    chinese, others = scripts["CJK"], sum(scripts[x] for x in WITHOUT_SPACES)
    # The rest may be names in Latin letters, of which a word has several.
    if 4 * (chinese + others) <= scripts.total():
        return "13a"
    return "char" if 10 * others > chinese else "zh"


def _losses(
    graph: Any,
    smoothing: float,
    params: Any,
    batch: Any,
    rngs: nnx.Rngs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Nats of each target token, and which of them are no padding, both [B, T]."""
    tokens = batch["target"]
    logits = nnx.merge(graph, params)(batch["source"], tokens[:, :-1], rngs=rngs)
    wanted = tokens[:, 1:]
    # Labels (1 - s) one-hot + s / V give the loss (1 - s) own + s uniform.
    own = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    # The cross-entropy with the uniform distribution, without a [B, T, V] array of it.
    uniform = jax.nn.logsumexp(logits, axis=-1) - logits.mean(-1)
    return (1 - smoothing) * own + smoothing * uniform, wanted > 0


def _loss_fn(
    graph: Any,
    smoothing: float,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
):
    nats, there = _losses(graph, smoothing, params, batch, nnx.Rngs(dropout=key))
    count = there.sum()
    loss = jnp.sum(nats, where=there) / jnp.maximum(count, 1)
    return (loss, count), (model_state, {})


def _score_fn(graph: Any, params: Any, model_state: Any, batch: Any) -> Totals:
    del model_state
    nats, there = _losses(graph, 0.0, params, batch)
    return {"loss": (jnp.sum(nats, where=there), there.sum())}


def _check_fit(
    corpus: Corpus, model: TransformerConfig, decoding: DecodingConfig
) -> Corpus:
    """The corpus, if the model has its tokens and holds its longest translation."""
    for split in SPLITS:
        if len(getattr(corpus, split)) == 0:
            raise ValueError(f"the corpus has no {split} pairs: prepare it again")
    # Jax raises nothing for an index beyond the embedding.
    largest = max(
        int(side.tokens.max()) for side in (corpus.train.source, corpus.train.target)
    )
    if largest >= len(corpus.vocabulary):
        raise ValueError(
            f"the corpus has a token {largest}, and its vocabulary "
            f"{len(corpus.vocabulary)} tokens: prepare it again"
        )
    if model.vocabulary < len(corpus.vocabulary):
        raise ValueError(
            f"the model's vocabulary is {model.vocabulary} and the corpus's "
            f"{len(corpus.vocabulary)}: set --task.model.vocabulary"
        )
    if model.context < corpus.max_tokens + decoding.extra_tokens:
        raise ValueError(
            f"the model's context is {model.context}, and a translation may have "
            f"{corpus.max_tokens} + {decoding.extra_tokens} tokens: set "
            "--task.model.context"
        )
    return corpus


def _check_lengths(corpus: Corpus, lines: Sequence[str]) -> None:
    for line, tokens in zip(lines, corpus.vocabulary.encode(lines), strict=True):
        if len(tokens) >= corpus.max_tokens:
            raise ValueError(
                f"a line must be shorter than {corpus.max_tokens} tokens, got "
                f"{len(tokens)}: {line[:40]}..."
            )


def _typical_batch(tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
    rows = max(1, tokens // TYPICAL_LENGTH)
    return {
        "source": jax.ShapeDtypeStruct((rows, TYPICAL_LENGTH), np.int32),
        "target": jax.ShapeDtypeStruct((rows, TYPICAL_LENGTH + 1), np.int32),
    }


def _translate(
    search: Callable[[np.ndarray], jax.Array],
    corpus: Corpus,
    config: DecodingConfig,
    lines: Sequence[str],
) -> list[str]:
    """The translations; lines that are longer than the corpus's longest are cut."""
    rows = corpus.vocabulary.encode(lines)
    rows = [[*row[: corpus.max_tokens - 1], END] for row in rows]
    found: dict[int, list[int]] = {}
    # The longest first: if the memory does not suffice, the first batch fails.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), config.rows):
        chosen = order[start : start + config.rows]
        length = -(-len(rows[chosen[0]]) // LENGTH_STEP) * LENGTH_STEP
        source = np.zeros((config.rows, min(length, corpus.max_tokens)), np.int32)
        for row, i in zip(source, chosen, strict=False):
            row[: len(rows[i])] = rows[i]
        phases.note(phases.RESULTS)  # A batch at a time.
        # Decoding drops `</s>` and the zeros after it, which are special tokens.
        found |= zip(chosen, np.asarray(search(source)).tolist(), strict=False)
    return corpus.vocabulary.decode([found[i] for i in range(len(rows))])


def _search(
    graph: Any, config: DecodingConfig, params: Any, source_BxS: jax.Array
) -> jax.Array:
    """Token ids of the best translations, [B, S + extra tokens]."""
    model = nnx.merge(graph, params)
    length = source_BxS.shape[1] + config.extra_tokens
    # Encoded before it is repeated: the beams of a sentence have one memory.
    memory, source = (
        jnp.repeat(x, config.beams, axis=0)
        for x in (model.encode(source_BxS), source_BxS)
    )
    found = beam_search(
        model.decode_next,
        model.start_cache(memory, source, length),
        first_token=START,
        end_token=END,
        max_length_B=(source_BxS > 0).sum(1) + config.extra_tokens,
        length=length,
        beams=config.beams,
        penalty=config.length_penalty,
    )
    return found.tokens[:, 0]
