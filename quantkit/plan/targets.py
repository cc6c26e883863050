r"""Regular expressions that name exactly a set of modules, for ``config_groups`` targets and ``ignore``.

A hand-written ``re:.*experts.*`` catches shared experts and the multi-token-prediction layer; a list of 57,000
names is read by no engine in reasonable time. So patterns are derived from the set: modules that differ only in
layer and expert number share one pattern, a number becomes ``\d+`` only where every module of that form in the
checkpoint belongs to the set, and the result is checked against all modules before it is used.

What stands before ``layers.`` is left open, since engines rename it (``language_model.model.`` and others).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UnsupportedError
from ..models.families import Family
from ..models.role import Role, TensorRole

_KIND_OF = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.|$)")  # as in models.classify
_OPEN = r"(?:.*\.)?"

Numbers = tuple[int, ...] | None  # None: any number


@dataclass(frozen=True, slots=True)
class _Form:
    """A module name without its numbers, split at the last dot."""

    parent: str
    last: str
    routed: bool


def form_of(module: str, role: TensorRole) -> _Form:
    """The form of a module: ``{L}`` for its layer, ``{E}`` for its routed expert, ``{N}`` for other numbers."""
    name = module + "."
    if role.layer is not None:
        name = name.replace(f".{role.layer}.", ".{L}.", 1)
    if role.expert is not None:
        name = name.replace(f".{role.expert}.", ".{E}.", 1)
    parent, _, last = _NUMBER.sub("{N}", name[:-1]).rpartition(".")
    return _Form(parent, last, role.role is Role.ROUTED_EXPERT)


class Universe:
    """All two-dimensional weights of a checkpoint by form, layer and expert."""

    def __init__(self, roles: Mapping[str, TensorRole], family: Family) -> None:
        self.family = family
        self._forms = {module: form_of(module, role) for module, role in roles.items()}
        self._roles = roles
        self._all = self._index(roles)

    def is_routed(self, module: str) -> bool:
        return self._forms[module].routed

    def _index(self, modules: Iterable[str]) -> dict[_Form, dict[int, set[int]]]:
        found: dict[_Form, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for module in modules:
            role = self._roles[module]
            found[self._forms[module]][_number(role.layer)].add(_number(role.expert))
        return found

    def patterns(self, members: Iterable[str]) -> tuple[str, ...]:
        """Targets (``re:...`` or plain names) that match exactly ``members`` among all modules, sorted."""
        merged: dict[tuple[str, bool, Numbers, Numbers], list[str]] = defaultdict(list)
        plain: list[str] = []
        members = frozenset(members)
        for form, layers in self._index(members).items():
            everywhere = self._all[form]
            if "{L}" not in form.parent:
                plain += self._outside(form, members)
                continue
            by_experts: dict[Numbers, list[int]] = defaultdict(list)
            for layer, experts in layers.items():
                by_experts[None if experts == everywhere[layer] else tuple(sorted(experts))].append(layer)
            for expert_numbers, numbers in by_experts.items():
                layer_numbers = None if len(numbers) == len(everywhere) else tuple(sorted(numbers))
                merged[form.parent, form.routed, layer_numbers, expert_numbers].append(form.last)
        layered = [self._render(*key, last=sorted(last)) for key, last in merged.items()]
        return (*sorted(plain), *sorted(layered))

    def _outside(self, form: _Form, members: frozenset[str]) -> list[str]:
        """Modules outside the decoder layers: by full name, or by one pattern when all of a form are members."""
        full = f"{form.parent}.{form.last}" if form.parent else form.last
        alike = [m for m, f in self._forms.items() if f == form]
        inside = [m for m in alike if m in members]
        if "{N}" not in full or len(inside) < len(alike):
            return inside
        return ["re:" + re.escape(full).replace(r"\{N\}", r"\d+") + "$"]

    def _render(self, parent: str, routed: bool, layers: Numbers, experts: Numbers, *, last: list[str]) -> str:
        before, _, after = parent.partition("{L}")
        path = re.escape(after).replace(r"\{E\}", _alternatives(experts)).replace(r"\{N\}", r"\d+")
        if routed:
            path = self._with_aliases(path)
            kinds = {_KIND_OF[name] for name in last}
            last = [name for name in self.family.expert_projections if _KIND_OF[name] in kinds]
        ends = re.escape(last[0]) if len(last) == 1 else f"(?:{'|'.join(map(re.escape, last))})"
        stem = re.escape(before.rstrip(".").rpartition(".")[2])
        return f"re:{_OPEN}{stem}\\.{_alternatives(layers)}{path}\\.{ends}$"

    def _with_aliases(self, path: str) -> str:
        own, *others = self.family.expert_paths
        if not others or f"\\.{own}\\." not in path:
            return path
        return path.replace(f"\\.{own}\\.", f"\\.(?:{'|'.join((own, *others))})\\.", 1)

    def check(self, groups: Mapping[str, Sequence[str]], membership: Mapping[str, str]) -> None:
        """Every module is matched by the patterns of its own group only, and every pattern matches something.

        Args:
            groups: group -> its patterns.
            membership: module -> group.

        Raises:
            UnsupportedError: the names can't be told apart by patterns (no published model has such names).
        """
        compiled = {p: (g, _compile(p)) for g, patterns in groups.items() for p in patterns}
        unused = set(compiled)
        for module in self._sample(membership):
            matched = [p for p, (_, regex) in compiled.items() if regex.match(module)]
            unused.difference_update(matched)
            hit, own = {compiled[p][0] for p in matched}, membership.get(module)
            if hit != ({own} if own else set()):
                raise UnsupportedError(
                    f"module {module!r} of {own} is matched by {', '.join(matched) or 'no pattern'}: its name "
                    "can't be told from others by a pattern, as the engines need it",
                    where="tensor names", accepted="names like those of published models",
                    hint="Rename the tensors.",
                )  # fmt: skip
        if unused:
            raise UnsupportedError(
                f"names can't be told apart by patterns: {', '.join(sorted(unused))} match nothing",
                where="tensor names", hint="Rename the tensors.",
            )  # fmt: skip

    def _sample(self, membership: Mapping[str, str]) -> Iterable[str]:
        """All modules; of many experts of one layer and group the first and last stand for the rest."""
        runs: dict[tuple[_Form, int | None, str | None], list[str]] = defaultdict(list)
        for module, form in self._forms.items():
            runs[form, self._roles[module].layer, membership.get(module)].append(module)
        for run in runs.values():
            yield from (run[0], run[-1]) if len(run) > 2 else run


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _alternatives(numbers: Numbers) -> str:
    if numbers is None:
        return r"\d+"
    return str(numbers[0]) if len(numbers) == 1 else f"(?:{'|'.join(map(str, numbers))})"


def matches(target: str, module: str) -> bool:
    """Whether a target (a name, or ``re:`` and an expression matched from the start) names a module."""
    return _compile(target).match(module) is not None


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern) + "$")
