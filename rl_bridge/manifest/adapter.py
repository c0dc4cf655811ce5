"""`AdapterSpec`: what belongs to a LoRA adapter beside its tensors, and the rules for their names.

An adapter is a version like any other: the same manifest, digests and lifecycle. Its tensors have
the names of PEFT's checkpoints, ``metadata["layout"]["kind"]`` is ``adapter``, and
``metadata["adapter"]`` holds the spec. Both are part of the header, which is sealed with the bytes.

A pair of matrices A (r, in) and B (out, r) adds ``scaling * B @ A`` to the weight (out, in) of its
module, where ``scaling`` is alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA. (Hu et al.,
arXiv 2106.09685; Kalajdzievski, arXiv 2312.03732; names and patterns as in PEFT 0.21.) The trainer
works out the scaling of each module; PEFT's configuration, in which it follows from patterns, is
carried for those who write a directory that PEFT reads.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, StrictStr, ValidationError

from rl_bridge.errors import IncompatibleUpdate, MalformedManifest
from rl_bridge.manifest.canonical import (
    Frozen,
    FrozenJSON,
    JSONValue,
    canonical_json,
    malformed,
    thaw,
)
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.parallel import ADAPTER, WeightLayout

PEFT_ROOT = "base_model.model."
"""With this begins each name of PEFT's checkpoints."""
_KEY = "adapter"
# A pair of matrices, and that of an embedding, whose names have no ".weight" behind.
_WORDS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_PAIR = re.compile(r"^(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)((?:\.weight)?)$")
_MATRIX = 2  # dimensions
_REMEDY = "Publish the model itself with adapter=, which fills them in."

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The two matrices of one adapted module.

    Attributes:
        module: its name in the model, without PEFT's root.
        a: name of matrix A, of shape (r, in); of an embedding (r, rows).
        b: name of matrix B, of shape (out, r); of an embedding (columns, r).
        rank: r.
        scaling: factor of the product of both.

    """

    module: str
    a: str
    b: str
    rank: int
    scaling: float


class AdapterSpec(Frozen):
    """What an update of an adapter says of itself.

    Attributes:
        name: by which requests ask for it; versions of one adapter have the same name.
        config: PEFT's configuration, as ``adapter_config.json`` has it.
        scaling: factor of B @ A in every module that `scalings` does not name.
        scalings: module -> its factor.
        base_root: root of the base weights that it was trained on, 32 hexadecimal digits; empty if
            that is not known.

    Raises:
        MalformedManifest: an unknown field, a value of the wrong type.

    """

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
    config: FrozenJSON
    scaling: FrozenJSON
    scalings: FrozenJSON = Field(default_factory=dict)
    base_root: Annotated[StrictStr, Field(pattern=r"^([0-9a-f]{32})?$")] = ""

    def __init__(self, /, **fields: Any) -> None:
        """Check `fields`; a wrong one is a `MalformedManifest`, not pydantic's own error."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise malformed('metadata["adapter"]', error, _REMEDY) from error
        for what, expected in (("config", "a mapping"), ("scalings", "a mapping of numbers")):
            if not isinstance(getattr(self, what), Mapping):
                raise self._refused(what, expected)
        if not _is_number(self.scaling):
            raise self._refused("scaling", "a number")
        if not all(map(_is_number, self.scalings.values())):
            raise self._refused("scalings", "a mapping of numbers")
        if self.config.get("peft_type", "LORA") != "LORA":
            raise self._refused("config", "one of LoRA, with peft_type 'LORA'")

    # ---- where it comes from --------------------------------------------------------------------

    @classmethod
    def of_peft(
        cls,
        name: str,
        config: Mapping[str, Any],
        modules: Iterable[str],
        *,
        scalings: Mapping[str, float] | None = None,
        base_root: str = "",
    ) -> Self:
        """The spec of an adapter with the configuration that PEFT's ``to_dict()`` gives.

        Args:
            name: of the adapter.
            config: PEFT's; sets in it become sorted lists.
            modules: names of the adapted modules, without PEFT's root.
            scalings: module -> factor of its B @ A; None: as the configuration says.
            base_root: root of the base weights; empty if it is not known.

        Raises:
            MalformedManifest: no rank or alpha in it, or something that is no JSON value.

        """
        plain = {key: _as_json(value) for key, value in config.items()}
        known = scalings or {one: _scaling(name, plain, one) for one in modules}
        usual = Counter(known.values()).most_common(1)
        scaling = usual[0][0] if usual else _scaling(name, plain, "")
        others = {module: own for module, own in known.items() if own != scaling}
        return cls(name=name, config=plain, scaling=scaling, scalings=others, base_root=base_root)

    @classmethod
    def inferred(cls, name: str, shapes: Shapes, *, lora_alpha: float, base_root: str = "") -> Self:
        """The spec that tensors alone tell: the rank by the shapes of A, the modules by the names.

        Args:
            name: of the adapter.
            shapes: of its tensors, under the names of PEFT's checkpoints.
            lora_alpha: PEFT's alpha.
            base_root: root of the base weights; empty if it is not known.

        Raises:
            IncompatibleUpdate: they are not the pairs of an adapter.

        """
        ranks = {module: shapes[a][0] for module, a, _ in _checked_pairs(name, shapes)}
        rank = max(ranks.values())
        config: dict[str, JSONValue] = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": lora_alpha,
            "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
            "rank_pattern": {f"^{re.escape(m)}": own for m, own in ranks.items() if own != rank},
            "bias": "none",
        }
        return cls.of_peft(name, config, ranks, base_root=base_root)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, JSONValue]) -> Self:
        """Read ``metadata["adapter"]``.

        Raises:
            MalformedManifest: it is no spec.

        """
        given = metadata.get(_KEY)
        if not isinstance(given, Mapping):
            raise MalformedManifest(
                f'the layout is of kind {ADAPTER!r}, and metadata["adapter"] is a '
                f"{type(given).__name__}, expected a mapping. {_REMEDY}"
            )
        return cls(**given)

    def to_metadata(self, metadata: Mapping[str, JSONValue] | None = None) -> dict[str, JSONValue]:
        """Give `metadata` with this spec and the kind of layout in it.

        Raises:
            MalformedManifest: its layout is of another kind.

        """
        layout = WeightLayout.from_metadata(metadata)
        given = dict((metadata or {}).get("layout") or {})
        if given.get("kind", ADAPTER) != ADAPTER:
            raise MalformedManifest(
                f"metadata['layout'] is of kind {layout.kind!r}, expected {ADAPTER!r} for an "
                "update of an adapter. Leave the kind out."
            )
        spec = {one: thaw(getattr(self, one)) for one in type(self).model_fields}
        return {**(metadata or {}), "layout": {**given, "kind": ADAPTER}, _KEY: spec}

    # ---- what it says ---------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Names its contents: what was computed of it is kept by it."""
        return text_digest(canonical_json({"spec": self.to_metadata()[_KEY]}))

    def scaling_of(self, module: str) -> float:
        """Factor of a module's B @ A."""
        return float(self.scalings.get(module, self.scaling))

    def pairs(self, shapes: Shapes) -> list[LoRAPair]:
        """The pairs of matrices among tensors of these names and shapes.

        Raises:
            IncompatibleUpdate: a matrix without the other one, or with another rank; no pair.

        """
        return [
            LoRAPair(module=module, a=a, b=b, rank=shapes[a][0], scaling=self.scaling_of(module))
            for module, a, b in _checked_pairs(self.name, shapes)
        ]

    def peft_text(self) -> bytes:
        """PEFT's ``adapter_config.json``."""
        config = thaw(self.config)
        assert isinstance(config, dict)  # as it was checked
        whole = {"peft_type": "LORA", **config, "inference_mode": True}
        return json.dumps(whole, indent=2, sort_keys=True).encode()

    def misread(self, shapes: Shapes) -> dict[str, float]:
        """Modules that PEFT would scale otherwise by its configuration, such as after set_scale().

        Args:
            shapes: as for `pairs`.

        Returns:
            module -> the factor that PEFT would take.

        Raises:
            IncompatibleUpdate: as for `pairs`.
            MalformedManifest: the configuration has no rank or alpha.

        """
        modules = [pair.module for pair in self.pairs(shapes)]
        read = type(self).of_peft(self.name, json.loads(self.peft_text()), modules)
        theirs = {module: read.scaling_of(module) for module in modules}
        return {one: own for one, own in theirs.items() if own != self.scaling_of(one)}

    def others(self, names: Iterable[str]) -> list[str]:
        """Names of tensors that belong to no pair: saved modules, biases, magnitudes."""
        return [name for name in names if not _PAIR.match(name)]

    def _refused(self, what: str, expected: str) -> MalformedManifest:
        given = repr(thaw(getattr(self, what)))[:80]
        return MalformedManifest(
            f"adapter {self.name!r}: {what} is {given}, expected {expected}. {_REMEDY}"
        )


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer that no float can hold
        return False


def _as_json(value: Any) -> JSONValue:
    """A value of PEFT's configuration as PEFT writes it to files."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value.value) if hasattr(value, "value") else value  # an enumeration


def _scaling(name: str, config: Mapping[str, Any], module: str) -> float:
    """A module's factor by PEFT's rules: the first pattern that fits its end decides."""

    def number(key: str, pattern_key: str) -> float:
        patterns: Mapping[str, Any] = config.get(pattern_key) or {}
        fits = (value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", module))
        value = next(fits, config.get(key))
        if not _is_number(value) or not value:
            raise MalformedManifest(
                f"adapter {name!r}: {key} is {value!r} in PEFT's configuration, expected a number "
                f"other than 0. Pass what peft_config.to_dict() gives."
            )
        return float(value)

    rank, alpha = number("r", "rank_pattern"), number("lora_alpha", "alpha_pattern")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _checked_pairs(adapter: str, shapes: Shapes) -> list[tuple[str, str, str]]:
    """Module, name of A and name of B, of each module that has one of them."""
    found: dict[str, tuple[str, str, str]] = {}
    for name in shapes:
        match = _PAIR.match(name)
        if match is None:
            continue
        path, word, end = match.groups()
        a, b = next(words for words in _WORDS if word in words)
        module = path.removeprefix(PEFT_ROOT)
        pair = (module, f"{path}.{a}{end}", f"{path}.{b}{end}")
        if found.setdefault(module, pair) != pair:
            raise IncompatibleUpdate(
                f"adapter {adapter!r}: module {module!r} has {name!r} and {found[module][1]!r}, of "
                "two pairs, expected one pair. Publish what get_peft_model_state_dict() gives."
            )
    if not found:
        raise IncompatibleUpdate(
            f"adapter {adapter!r}: none of its {len(shapes)} tensors is a lora_A, such as "
            f"{PEFT_ROOT}layers.0.q_proj.lora_A.weight. Publish what PEFT's "
            "get_peft_model_state_dict() gives."
        )
    for module, a, b in found.values():
        if a not in shapes or b not in shapes:
            has, lacks = (a, b) if a in shapes else (b, a)
            raise IncompatibleUpdate(
                f"adapter {adapter!r}: module {module!r} has {has!r} and no {lacks!r}: half of a "
                "pair says nothing. Publish both."
            )
        one, other = shapes[a], shapes[b]
        if len(one) != _MATRIX or len(other) != _MATRIX or one[0] != other[1] or not one[0]:
            raise IncompatibleUpdate(
                f"adapter {adapter!r}: {a!r} of shape {list(one)} and {b!r} of shape "
                f"{list(other)}, expected matrices (r, in) and (out, r). Leave a module of another "
                "kind out of target_modules."
            )
    return list(found.values())
