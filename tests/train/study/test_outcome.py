"""Results of seeds that are trained one group after the other."""

from train.study.outcome import SeedsOutcome, in_turn


def outcome(*seeds):
    """Numbers by seed, which tell the fields apart."""
    losses = [[seed + 0.25] for seed in seeds]
    return SeedsOutcome(
        seconds=2.0,
        losses=[(5, [*seeds]), (10, [-x for x in seeds])],
        training_loss=[x + 0.5 for x in seeds],
        evaluations=[(10, {"loss": [10 * x for x in seeds]})],
        judged={},
        workers={"loss": losses},
        consensus_distance=[x / 8 for x in seeds],
        tensors=["w"],
        dispersion=[(0, {"gini": losses})],
        sent={"per link": [100 * x for x in seeds]},
    )


def test_groups_in_turn_come_to_what_all_would_and_progress_continues():
    steps = []

    def train(group, report):
        report(3, "")
        return outcome(*group)

    found = in_turn(train, [(1, 2), (3,)], 10, lambda step, _: steps.append(step))
    assert found == outcome(1, 2, 3)._replace(seconds=4.0)
    assert steps == [3, 13]
