"""Reads the config.json of earlier versions.

The sections of 0.2 had fields of several kinds, up to 0.3 a method was in three, and up
to 0.4 navigation was a task of the program, and numbers that few change were fields.
"""

from typing import Any

NAVIGATION = "examples/navigation/navigate.py:NavigateTask"
# Fields of 0.4 with their default, which alone is read, and the field of which an own
# function has other values.
MERGE = "exchange.merge"
GONE = {
    **{"weights": ("tokens", MERGE), "discount": (0.5, MERGE), "trimmed": (0, MERGE)},
    **{"guard": ("none", MERGE), "guard_ratio": (5.0, MERGE), "oldest": (None, MERGE)},
    **{"seed": (0, "topology.make"), "decay_factor": (0.1, "optimizer.decay")},
    "power": (1.0, "method"),
}


def upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config as this version writes them.

    Raises:
      ValueError: if the run has what this version has not.
    """
    fields = dict(fields)
    exchange, policy = fields.get("exchange"), fields.get("policy")
    if (task := fields.get("task", {})).get("kind") == "NavigateTask":
        fields["task"] = {**task, "kind": NAVIGATION}
    if isinstance(exchange, dict) and isinstance(exchange.get("where"), str):
        fields["exchange"] = _exchange(exchange)
    if isinstance(policy, dict) and isinstance(policy.get("name"), str):
        fields["policy"] = _policy(policy)
    if not isinstance(fields.get("method"), dict):
        fields |= _method(fields)
    fields.pop("straggler", None)
    own = {"optimizer": _optimizer, "method": _rounds}
    for name in ("exchange", "topology", *own):
        if isinstance(part := fields.get(name), dict):
            fields[name] = own.get(name, _without_gone)(part)
    if "timeout_seconds" in (job := fields.get("distributed") or {}):
        # The deadline of a step is in its place, and each start has its own.
        fields["distributed"] = {x: job[x] for x in job if x != "timeout_seconds"}
    return fields


def _exchange(old: dict[str, Any]) -> dict[str, Any]:
    kind, way = old["where"], old.get("way", "arrived")
    if kind != "peers":
        return {"kind": kind}
    shared = {x: old[x] for x in ("bind", "addresses", "secret_file") if x in old}
    patience = old.get("patience", 0.0)
    if way == "wagma":
        # 0 stood for a minute.
        patience = 60.0 if patience == 0 else patience
        return {"kind": "groups", "patience": patience} | shared
    if way == "push_sum":
        raise ValueError(
            "its peers averaged by push_sum, which is gone: read it with decentjax 0.2"
        )
    own = {x: old[x] for x in ("elastic", "quorum", "silent_seconds") if x in old}
    return {"kind": "peers", "way": way, "patience": patience} | shared | own


def _rounds(old: dict[str, Any]) -> dict[str, Any]:
    """A method of 0.4, of whose merge and copies the numbers were fields."""
    new = {x: old[x] for x in old if x not in ("share", "copy_step")}
    if old.get("merge") == "blend":
        new["merge"] = ["blend", old.get("share", 0.5)]
    if isinstance(has_copies := old.get("copies"), bool):
        new["copies"] = (old.get("copy_step") or "auto") if has_copies else None
    if isinstance(policy := old.get("policy"), dict):
        new["policy"] = _without_gone(policy)
    return new


def _optimizer(old: dict[str, Any]) -> dict[str, Any]:
    """An optimizer of 0.4, with a momentum and own functions as fields beside."""
    new = _without_gone(old)
    make, schedule = new.pop("make", None), new.pop("schedule", None)
    if (momentum := new.pop("momentum", None)) is not None:
        if old.get("name") == "muon":  # Which took both.
            _check_gone("momentum", momentum, old.get("b1"), "optimizer.name")
        if old.get("name") in ("sgd", "exact_diffusion", "qg_dsgdm"):
            new["b1"] = momentum
    own = {"decay": schedule, "decay_steps": []} if schedule else {}
    return new | own | ({"name": make} if make else {})


def _without_gone(old: dict[str, Any]) -> dict[str, Any]:
    for name, (default, instead) in GONE.items():
        _check_gone(name, old.get(name, default), default, instead)
    return {x: old[x] for x in old if x not in GONE}


def _check_gone(name: str, value: Any, wanted: Any, instead: str) -> None:
    """Raises a ValueError if a field that is gone has another value."""
    if value != wanted:
        raise ValueError(
            f"it has {name} = {value}, not {wanted}, which is no longer a field: read "
            f"it with decentjax 0.4, or set {instead} to a function of yours"
        )


def _method(fields: dict[str, Any]) -> dict[str, Any]:
    """The sections of step.algorithm, rounds and policy, which are taken out."""
    rounds, policy = fields.pop("rounds", {}), fields.pop("policy", {"kind": "fixed"})
    step = dict(fields.get("step", {}))
    kind = step.pop("algorithm", "awc")
    parts = rounds if kind == "rounds" else {"policy": policy}
    made = {"kind": kind, **({} if kind == "all_reduce" else parts)}
    return {"step": step, "method": fields.get("method") or made}


def _policy(old: dict[str, Any]) -> dict[str, Any]:
    names = {
        "thinning": ("degree", "per_epoch", "epoch_steps"),
        "holding": ("graphs", "target", "every_steps"),
        "damping": ("power",),
    }
    defaults = {"least": 2, "slack": 0.2, "measure": "gini", "levels": 8}
    gone = [x for x, default in defaults.items() if old.get(x, default) != default]
    if gone:
        raise ValueError(
            f"its policy has {gone[0]} = {old[gone[0]]}, which is no longer an option: "
            "read it with decentjax 0.2"
        )
    kind = old["name"]
    return {"kind": kind} | {x: old[x] for x in names.get(kind, ()) if x in old}
