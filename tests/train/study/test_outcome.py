"""Results of seeds that are trained one group after the other."""

import json

import pytest

from tests import line
from train.study.outcome import SeedsOutcome, in_turn, kept


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evaluations", []),
        ("evaluations", [[10, {"loss": [1.0]}]]),
        ("evaluations", [[10, {"loss": "1"}]]),
        ("evaluations", [[10]]),
        ("losses", 3),
        ("training_loss", "x"),
        ("workers", {"loss": [1.0, 2.0]}),
        ("other", 1),
        (None, [1]),
    ],
)
def test_results_of_another_form_are_not_taken(field, value, tmp_path):
    path, trained = tmp_path / "line.json", []

    def results():
        def train():
            trained.append(1)
            return outcome(1, 2)

        return kept(path, line.config, range(2), train)

    assert results().training_loss == results().training_loss == [1.5, 2.5]
    assert trained == [1]
    found = json.loads(path.read_text())
    changed = {**found["outcome"], field: value} if field else value
    path.write_text(json.dumps({**found, "outcome": changed}))
    assert results() == outcome(1, 2)
    assert trained == [1, 1]


def test_results_that_are_no_object_are_an_error(tmp_path):
    (tmp_path / "line.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"line\.json must hold a JSON object"):
        kept(tmp_path / "line.json", line.config, range(2), lambda: outcome(1, 2))
