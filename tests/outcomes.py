"""Results of several seeds, made by hand."""

from train.study.outcome import SeedsOutcome


def outcome(scores, **changes) -> SeedsOutcome:
    """A held-out loss for each seed, after two steps."""
    made = SeedsOutcome(
        seconds=1.0,
        losses=[(1, [2.0] * len(scores)), (2, scores)],
        training_loss=scores,
        evaluations=[(2, {"loss": scores})],
        judged={},
        workers={"loss": [[score, score + 1] for score in scores]},
        consensus_distance=[0.5] * len(scores),
        tensors=[],
        dispersion=[],
        sent={},
    )
    return made._replace(**changes)
