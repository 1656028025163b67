"""A contract for import-linter: which rooms each room may see, and no others."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Sees(Contract):
    """Rooms and what they may import, `room -> room room`; every room is named.

    A room is a module or package two names deep, with all that is inside it. Imports
    for type checkers alone count too.
    """

    rooms = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        allowed = {}
        for line in self.rooms:  # type: ignore[attr-defined]
            room, seen = line.split("->")
            allowed[room.strip()] = set(seen.split())
        roots = {"decentjax", "train", "benches"}
        of_these = {room.partition(".")[0] for room in allowed}
        found = {".".join(m.split(".")[:2]) for m in graph.modules}
        wrong = [
            f"{room} is in the contract, and no such room exists"
            for room in sorted(allowed.keys() - found)
        ]
        for module in sorted(graph.modules):
            room = ".".join(module.split(".")[:2])
            if "." not in room or module.split(".")[0] not in of_these:
                continue
            if room not in allowed:
                wrong.append(f"{room} is in no contract")
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                other = ".".join(imported.split(".")[:2])
                if imported.split(".")[0] not in roots or other == room:
                    continue
                if other not in allowed[room]:
                    wrong.append(f"{module} imports {imported}")
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["wrong"]:
            output.print_error(line)
