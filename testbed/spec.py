"""What is asked for: link profiles and cells. Frozen records, every number resolved, no default that changes a measured number.

A profile file (`netem_profiles/NAME.toml`) is read by `load_profile`; experiment files by `sweep.plan`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from testbed import paths, units
from testbed.errors import SpecError, UnknownNameError

Engine = Literal["netem", "relay"]
Direction = Literal["forward", "backward"]


class Frozen(BaseModel):
    """Base of every record: immutable, keyword-only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Pipe(Frozen):
    """One direction of an access link: `start = max(now, free); free = start + bytes * 8 / rate; due = free + delay`.

    A packet is dropped when `start - now` exceeds the buffer, or when the loss model says so.
    """

    rate_bps: int = Field(ge=8_000, le=100_000_000_000)
    """Bits per second of the profile's layer."""
    delay_ns: int = Field(ge=0, le=10_000_000_000)
    """One way, without serialisation."""
    buffer_bytes: int = Field(ge=1)
    """What waits at most for the wire: drop-tail, packets in flight not counted."""
    loss: float = Field(ge=0, lt=1)
    """Probability that a packet is lost, independent from packet to packet."""
    seed: int = Field(ge=0, lt=2**63)
    """Same seed, same packets lost, counted from the link's first packet."""

    @property
    def buffer_ns(self) -> int:
        """The buffer as the time that it takes to drain."""
        return round(self.buffer_bytes * 8e9 / self.rate_bps)


class LinkProfile(Frozen):
    """An access link: a pipe away from the stage (`up`) and one towards it (`down`); None is an unshaped direction."""

    name: str
    summary: str
    source: str
    """Where the numbers come from."""
    layer: Literal["ip", "ethernet"]
    """What the rate counts: IP packets, or Ethernet frames (14 bytes more each)."""
    mtu: int = Field(ge=576, le=9000)
    congestion_control: str = Field(pattern=r"^[a-z0-9_]+$")
    slow_start_after_idle: bool
    """net.ipv4.tcp_slow_start_after_idle at both ends: it decides what a small message costs after a pause."""
    up: Pipe | None
    down: Pipe | None

    @property
    def shaped(self) -> bool:
        return self.up is not None or self.down is not None

    @model_validator(mode="after")
    def _buffer_holds_a_packet(self) -> LinkProfile:
        for side, pipe in (("up", self.up), ("down", self.down)):
            if pipe is not None and pipe.buffer_bytes < self.mtu:
                raise ValueError(f"{side}.buffer holds {pipe.buffer_bytes} bytes, less than one packet of {self.mtu}")
        return self


class WorkloadSpec(Frozen):
    """Which model learns what."""

    family: Literal["gpt2"]
    model: str
    """A named size (see `testbed.workloads`), or the id or path of a cached checkpoint."""
    text: str
    """'bundled', or the path of a UTF-8 text file."""
    sequence_length: int = Field(ge=2)
    batch_size: int = Field(ge=1)
    """Sequences in one step, all micro-batches together."""
    validation_batches: int = Field(ge=1)
    """Batches of the fixed validation split that an evaluation reads."""


class PipelineSpec(Frozen):
    """How the model is cut and in which order the pieces work."""

    stages: int = Field(ge=1, le=64)
    microbatches: int = Field(ge=1)
    schedule: Literal["gpipe", "1f1b"]
    in_flight: int = Field(ge=1)
    """Micro-batches that the first stage may have in flight at once (1f1b; gpipe has all of them)."""


class OptimiserSpec(Frozen):
    """AdamW."""

    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    clip_norm: float = Field(gt=0)
    """The global gradient norm, over all stages, is clipped to this."""


class TrainingSpec(Frozen):
    """How long, and from which seed."""

    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    """First steps that are recorded, marked, and left out of timing statistics."""
    seed: int = Field(ge=0)
    evaluate_every: int = Field(ge=0)
    """Steps between evaluations; 0 means only at the end."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> TrainingSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, which leaves none of {self.steps} steps")
        return self


class Cell(Frozen):
    """One combination of a sweep: all that decides a run."""

    schema_version: Literal[1] = 1
    """Raised when a field changes its meaning, so that old results are not taken for new ones."""
    codec: str
    """A name from `testbed codecs`, or 'pkg.mod:Class'."""
    profile: LinkProfile
    topology: Literal["star"]
    engine: Engine
    compute: Literal["measured"]
    workload: WorkloadSpec
    pipeline: PipelineSpec
    optimiser: OptimiserSpec
    training: TrainingSpec

    @model_validator(mode="after")
    def _batch_divides(self) -> Cell:
        if self.workload.batch_size % self.pipeline.microbatches:
            batch, parts = self.workload.batch_size, self.pipeline.microbatches
            raise ValueError(f"workload.batch_size {batch} cannot be cut into {parts} equal micro-batches")
        return self

    @property
    def id(self) -> str:
        """Readable, and different whenever anything in the cell is: `int8-cable-1a2b3c4d5e`."""
        digest = hashlib.blake2b(canonical_json(self).encode(), digest_size=5).hexdigest()
        codec = "".join(c if c.isalnum() or c in "-_" else "_" for c in self.codec)
        return f"{codec}-{self.profile.name}-{digest}"


def canonical_json(record: BaseModel) -> str:
    """The one text of a record: sorted keys, no spaces."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def _known_fields(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The field names at a place inside a nested record."""
    for part in place:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def explain(error: ValidationError, model: type[BaseModel], where: str) -> SpecError:
    """A pydantic error as one message that names the file, the key, what was found, and the nearest known key."""
    found = []
    for item in error.errors(include_url=False):
        *place, last = item["loc"] or ("file",)
        key = ".".join(str(part) for part in (*place, last))
        if item["type"] == "extra_forbidden":
            known = _known_fields(model, tuple(place))
            near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.5)
            hint = f" (did you mean {'.'.join([*map(str, place), near[0]])!r}?)" if near else ""
            found.append(f"there is no key {key!r}{hint}; known here: {', '.join(known)}")
        elif item["type"] in ("missing", "value_error"):
            found.append(
                f"{key}: {item['msg'].removeprefix('Value error, ')}"
                if item["loc"]
                else item["msg"].removeprefix("Value error, ")
            )
        else:
            found.append(f"{key}: {item['msg']}, found {item['input']!r}")
    return SpecError(f"{where}: " + "; ".join(found))


_PIPE_KEYS = {"rate": "rate_bps", "delay": "delay_ns", "buffer": "buffer_bytes", "loss": "loss", "seed": "seed"}


def _read_pipe(side: str, table: object) -> dict[str, Any] | None:
    if table == "unshaped":
        return None
    if not isinstance(table, dict):
        raise SpecError(f"{side} must be a table or the word 'unshaped', found {table!r}")
    for key in table:
        if key not in _PIPE_KEYS:
            raise UnknownNameError(f"key of [{side}]", key, _PIPE_KEYS)
    if missing := [key for key in _PIPE_KEYS if key not in table]:
        raise SpecError(f"[{side}] lacks {', '.join(missing)}; a profile states every number")
    rate = units.parse_rate(table["rate"])
    try:
        buffer = units.parse_size(table["buffer"])
    except SpecError:
        buffer = rate * units.parse_time(table["buffer"]) // 8_000_000_000
    loss = 0.0 if table["loss"] == "none" else units.parse_fraction(table["loss"])
    return {
        "rate_bps": rate,
        "delay_ns": units.parse_time(table["delay"]),
        "buffer_bytes": buffer,
        "loss": loss,
        "seed": table["seed"],
    }


def read_profile(path: Path) -> LinkProfile:
    """Read one profile file. SpecError or UnknownNameError names the file, the key and what is wrong."""
    try:
        table = read_toml(path)
        known = [name for name in LinkProfile.model_fields if name != "name"]
        for key in table:
            if key not in known:
                raise UnknownNameError("key", key, known)
        pipes = {side: _read_pipe(side, table[side]) for side in ("up", "down") if side in table}
        return LinkProfile.model_validate(dict(table) | pipes | {"name": path.stem})
    except ValidationError as error:
        raise explain(error, LinkProfile, f"profile {path}") from None
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"profile {path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. SpecError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from None


def profile_files() -> dict[str, Path]:
    """Every profile by name: `./netem_profiles` before the shipped ones."""
    found: dict[str, Path] = {}
    for folder in reversed(paths.profile_folders()):
        found |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return found


def load_profile(name: str) -> LinkProfile:
    """A profile by name, or by the path of its file. UnknownNameError suggests the nearest name."""
    if name.endswith(".toml"):
        return read_profile(Path(name))
    files = profile_files()
    if name not in files:
        raise UnknownNameError("profile", name, files)
    return read_profile(files[name])
