"""Reads the config.json of earlier versions.

The sections of 0.2 had fields of several kinds, up to 0.3 a method was in three, and up
to 0.4 navigation was a task of the program.
"""

from typing import Any

NAVIGATION = "examples/navigation/navigate.py:NavigateTask"


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
        fields["rounds"] = _rounds(fields.get("rounds", {}))
    if isinstance(policy, dict) and isinstance(policy.get("name"), str):
        fields["policy"] = _policy(policy)
    if not isinstance(fields.get("method"), dict):
        fields |= _method(fields)
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
    # 1 was the default, which is None now; with copies it is the step that was taken.
    unused = old.get("copy_step") == 1 and not old.get("copies")
    return {x: old[x] for x in old if not (unused and x == "copy_step")}


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
