"""Resolves one cell from nested tables: looks up names, and checks what can be checked without starting anything."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from testbed import devices, manifest
from testbed.codecs.catalogue import placement as codecs
from testbed.codecs.catalogue import table
from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.errors import SpecError, UnknownNameError, UserError
from testbed.faults import read_faults
from testbed.frozen import explain
from testbed.jobs.kind import JobKind
from testbed.net.relay.client import refuse_unsupported
from testbed.net.topology import plan_lab
from testbed.profiles import LinkProfile, load_profile
from testbed.replay import pipelines, workers
from testbed.spec import (
    RINGS,
    Calibrated,
    Cell,
    Clock,
    CodecRates,
    Compute,
    DataParallelSpec,
    Engine,
    Measured,
    Paced,
    TextSpec,
)
from testbed.workloads import checkpoints, texts
from testbed.workloads import models as workloads


def resolve_cell(
    fields: Mapping[str, Any],
    engine: Engine,
    where: str,
    clock: Clock = "real",
    load: Callable[[str], LinkProfile] = load_profile,
) -> Cell:
    """Build the cell that the tables describe. A cell that cannot run raises a UserError that names the field.

    `load` loads a profile by name; pass a caching one to resolve many cells.

    A file states `profile` where the cell has profiles, and may name a device where the cell has durations. `engine`
    applies to the real clock, `clock` to played cells and to live ones whose codecs cost nothing. The compute of a live
    cell that states `calibrated` becomes `measured`.
    """
    content = dict(fields)
    for name in content.keys() & {"profiles", "outside"}:
        raise UnknownNameError(f"key of {where}", name, ("profile",))
    for name in ("clock", "engine"):
        if name in content:
            raise SpecError(
                f"{where}: {name} cannot be stated per cell; write {name} = ... at the top of the file, or "
                f"--{name} on the command line"
            )
    if not isinstance(content.get("codec"), str):
        raise SpecError(
            f"{where}: codec must be a string, for example int8 or ef(topk(0.1)); found {content.get('codec')!r}"
        )
    content["profiles"] = [profile.model_dump() for profile in _profiles(content.pop("profile", None), where, load)]
    compute, faults = content.pop("compute", None), content.pop("fault", None)
    if compute is None:
        raise SpecError(f"{where}: compute is missing; add for example compute.mode = 'calibrated'")
    if "job" in content:
        neutral = {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "clip_norm": 1.0}
        content.setdefault("optimiser", neutral)  # a job without training needs no optimiser
    if ("job" in content or isinstance(content.get("data"), dict)) and isinstance(content.get("pipeline", {}), dict):
        one = {"stages": 1, "microbatches": 1, "schedule": "gpipe", "in_flight": 1}
        content["pipeline"] = {**one, **content.get("pipeline", {})}
    workload = content.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("model"), str) and "images" not in workload:
        family = workloads.model_size(workload["model"]).family
        content["workload"] = {"family": family, "weights": checkpoints.weights_digest(workload["model"]), **workload}
    try:
        # Through JSON, so that 1, 1.0 and true stay distinct, and strictly: a string is not accepted as a number.
        timing = content.setdefault("timing", "played")
        own_pace = {"mode": "measured" if timing == "live" else "calibrated"}
        # Live codecs with their actual cost need the real clock, except in data parallel training.
        codecs_fit = "data" in content or content.get("codec_cost") == "zero"
        virtual = clock == "virtual" and (timing == "played" or codecs_fit)
        means = {"engine": "netem" if virtual else engine, "clock": "real"}
        # The device's rates are filled in below.
        changes: dict[str, Any] = {
            "clock": "virtual" if virtual else "real",
            "codec_cost": content.get("codec_cost", "host"),
        }
        text = json.dumps({**content, **means, "compute": own_pace, "codec_cost": "host"})
        cell = Cell.model_validate_json(text, strict=True)
        workloads.check_workload(cell.workload, cell.pipeline.stages, cell.pipeline.layers)
        if isinstance(cell.workload, TextSpec):
            checkpoints.check_weights(cell.workload)
        # After the check, because it needs a valid workload.
        durations = _durations(cell, compute, where)
        if timing == "live" and isinstance(durations, Calibrated):
            if durations.varied:
                raise SpecError(
                    f"{where}: a live cell whose compute is calibrated takes this machine's time, which cannot be "
                    "drawn; set compute.mode = 'paced' or 'stated', or remove compute.spread, stragglers and slow"
                )
            durations = Measured()
        if faults is not None:
            run = "played" if timing == "played" else f"live_{changes['clock']}"
            try:
                changes["fault"] = read_faults(faults, cell.links_by_name, run)
            except UserError as error:
                raise SpecError(f"{where}: {error}") from None
        changes["codec_rates"] = _codec_rates(content.get("codec_cost"), compute, where)
        # Equivalent codec texts make the same cell. The rules of a job of a table `job` are for what its kind numbers.
        codec = codecs.parse_placement(cell.codec)
        codec = codec if cell.job is not None else codec.over(cell.boundaries)
        messages = list(codec.specs())
        if isinstance(data := cell.parallelism, DataParallelSpec):
            changes["data"] = _checked_data(data, codec, where)
            _check_data_means(cell, data, durations, changes, where)
            messages += [] if (answer := changes["data"].answer) is None else [parse_codec(answer)]
        if isinstance(job := cell.parallelism, JobKind):
            messages += [spec for text in job.more_codecs for spec in codecs.parse_placement(text).specs()]
            _check_tensors(messages, "a job of a table `job` sends tensors outside of a pipeline", where)
        changes["outside"] = _digest_outside(cell, messages)
        cell = Cell(**dict(cell) | changes | {"codec": codec.text, "compute": durations})
    except ValidationError as error:
        raise explain(error, Cell, where) from None
    _check_network(cell, where)
    _check_frozen(cell, where)
    _check_device(cell, where)
    if cell.codec_rates is not None:
        try:  # fail before training: the device cost of some codecs is unknown
            if isinstance(cell.parallelism, DataParallelSpec):
                workers.node_times(cell)
            else:
                pipelines.stage_cost(cell, None)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    if isinstance(cell.parallelism, JobKind) and cell.codec_cost == "device":
        raise SpecError(
            f"{where}: in a job of a table `job`, codecs take no time or the time they take here: set codec_cost to "
            "'zero' or 'host'"
        )
    if codec.measures and cell.timing == "played":
        raise SpecError(
            f"{where}: codec {cell.codec} adapts to its link, so training differs over each link and cannot be "
            'played; set timing = "live"'
        )
    if cell.pipeline.schedule == "1f1b" and cell.pipeline.in_flight < min(
        cell.pipeline.stages, cell.pipeline.microbatches
    ):
        raise SpecError(
            f"{where}: pipeline.in_flight is {cell.pipeline.in_flight}; to keep {cell.pipeline.stages} stages busy, "
            f"set it to at least {min(cell.pipeline.stages, cell.pipeline.microbatches)} micro-batches"
        )
    return cell


def _digest_outside(cell: Cell, specs: Iterable[CodecSpec]) -> str | None:
    """Hash the modules of third-party codecs and jobs, and the files of a local text; None without any. SpecError if
    one is missing.
    """
    names = {part.name for spec in specs for part in spec.parts()}
    names |= {cell.job.kind} if isinstance(cell.job, JobKind) else set()
    found = (table.locate_module(name.partition(":")[0], name).origin for name in sorted(names) if ":" in name)
    files = [Path(origin) for origin in found if origin]
    text = cell.workload.text if isinstance(cell.workload, TextSpec) else None
    if text is not None and text not in texts.BUNDLED and texts.hub_set(text, "text") is None:
        files += texts.local_files(text)
    digests = "".join(map(manifest.digest, files))
    return hashlib.sha256(digests.encode()).hexdigest() if digests else None


def _durations(cell: Cell, compute: Any, where: str) -> Compute:
    """Return the durations that a cell's compute asks for; in data parallel training, of one worker's micro-batch."""
    match cell.parallelism:
        case JobKind():
            return devices.compute_of_job(compute, where)
        case DataParallelSpec() as data:
            parts = data.batch_parts * cell.pipeline.microbatches
            one = cell.pipeline.model_copy(update={"microbatches": parts})
            return devices.compute_of(compute, cell.workload, one, where, workers=data.workers)
        case _:
            return devices.compute_of(compute, cell.workload, cell.pipeline, where)


def _checked_data(data: DataParallelSpec, messages: codecs.Placement, where: str) -> DataParallelSpec:
    """Return a cell's data parallel settings, with the codec of the answer in canonical form. SpecError for codecs
    that do not work in data parallel training.
    """
    answer = None if data.answer is None else parse_codec(data.answer)
    sent = [messages.at(worker, "backward") for worker in range(data.workers)]
    _check_tensors((*sent, *([] if answer is None else [answer])), "data parallel training sends gradients", where)
    if data.exchange in ("all-reduce", "pairs") and (len(set(sent)) > 1 or not sent[0].row.linear):
        what = "whose partial sums are encoded at every hop" if data.exchange == "all-reduce" else "which sends weights"
        raise SpecError(
            f"{where}: data.exchange is {data.exchange!r}, {what}, but codec "
            f"{messages.text} does more than round each value; use fp32 or bf16, or exchange = 'all-gather' or 'star'"
        )
    if data.arrivals is not None and answer is not None and not answer.row.linear:
        raise SpecError(
            f"{where}: data.answer is {answer.text!r}, but with data.arrivals a server answers with weights, each "
            "worker at different steps; use a codec that only rounds and has no state: fp32, bf16 or fp16"
        )
    return data.model_copy(update={"answer": None if answer is None else answer.text})


def _check_tensors(specs: Iterable[CodecSpec], why: str, where: str) -> None:
    """Raise SpecError for a codec that works between the stages of a pipeline only."""
    for spec in specs:
        for part in spec.parts():
            if part.row.hook or part.row.pairs or part.row.measures:
                raise SpecError(
                    f"{where}: codec {spec.text}: {part.name} needs activations or adapts to its link, but {why}; use "
                    "a codec that needs neither, for example ef(topk(0.01))"
                )


def _check_data_means(
    cell: Cell, data: DataParallelSpec, durations: object, changes: Mapping[str, Any], where: str
) -> None:
    """Raise SpecError for a data parallel cell that cannot be run."""
    if cell.played_steps is not None:
        raise SpecError(f"{where}: data parallel training is always played in full; remove played_steps")
    if cell.timing == "live" and not isinstance(durations, Paced):
        raise SpecError(
            f"{where}: live data parallel training needs stated durations: set compute.mode = 'paced', with a device "
            "or durations; or set timing = 'played'"
        )
    if cell.timing == "live" and (changes["clock"], changes["codec_cost"]) == ("real", "device"):
        raise SpecError(
            f"{where}: live on the real clock, codecs take the time they take here, or none: set codec_cost = 'host' "
            "or 'zero'; or run it on the virtual clock (--clock virtual)"
        )
    for name in ("deco", "arrivals"):
        if getattr(data, name) is not None and cell.timing == "played":
            raise SpecError(
                f"{where}: data.{name} adapts to the links, so training differs over each link and cannot be played; "
                'set timing = "live"'
            )
    if data.deco is not None and data.exchange in RINGS:
        raise SpecError(
            f"{where}: data.deco makes one node announce its choice to all others, but with data.exchange "
            f"{data.exchange!r} a worker has only two peers; set exchange = 'star' or 'all-to-all'"
        )
    if cell.timing == "live" and cell.training.target_loss:
        raise SpecError(
            f"{where}: data parallel workers do not synchronise at each step, so a live worker cannot announce that "
            "the target loss is reached; remove training.target_loss, or set timing = 'played'"
        )


def _check_device(cell: Cell, where: str) -> None:
    """Raise SpecError for a cell that cannot be trained on the device that it states."""
    on = f"{where}: training.device is {cell.training.device!r}"
    if cell.training.device == "cpu":
        return
    if cell.job is not None:
        raise SpecError(f"{on}, but jobs of a table `job` train on the CPU; remove it")
    if cell.timing == "live":
        if cell.data is not None:
            raise SpecError(f"{on}, but the workers of a live cell train on the CPU; set timing = 'played'")
        if cell.clock == "virtual":
            raise SpecError(
                f"{on}, but a live cell on the virtual clock trains in a guest, which has no GPU; --clock real"
            )
        return
    if isinstance(cell.compute, Calibrated) or cell.codec_cost == "host":
        raise SpecError(
            f"{on}, but calibrated compute, and codec_cost 'host', are timed on one core of this machine; set "
            "compute.mode = 'paced' and a device, for example compute.device = 'h200', and codec_cost = 'device' or "
            "'zero'"
        )


def _check_frozen(cell: Cell, where: str) -> None:
    """Raise SpecError if `frozen_after` is set where messages cannot be computed from the previous step's aggregate."""
    frozen, data = cell.optimiser.frozen_after, cell.data
    if frozen is not None and (
        data is None or data.outer is not None or data.deco is not None or max(data.staleness) > 0
    ):
        raise SpecError(
            f"{where}: optimiser.frozen_after is {frozen}; from then on, workers send first moments that continue the "
            "previous step's, which requires data parallel training with data.staleness = 0, without data.outer and "
            "data.deco: set these, or remove frozen_after"
        )


def _codec_rates(rule: Any, compute: Any, where: str) -> CodecRates | None:
    """Return the rates of the device whose speed determines codec costs; None under the other rules."""
    if rule != "device":
        return None
    name = compute.get("device") if isinstance(compute, Mapping) else None
    if not isinstance(name, str):
        raise SpecError(
            f"{where}: codec_cost is 'device', but compute names no device; set compute.mode = 'paced' and "
            "compute.device, or codec_cost = 'host' or 'zero'"
        )
    device = devices.load_device(name)
    rates = devices.rates_of(device)
    return CodecRates(
        bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s, operations_per_s=rates.operations_per_s, source=device.name
    )


def _profiles(names: Any, where: str, load: Callable[[str], LinkProfile]) -> list[LinkProfile]:
    """Load the profiles of a cell's links, from one name or a list of names."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise SpecError(f"{where}: profile must be a name, or a list of names, one per link; found {names!r}")
    known = {name: load(name) for name in dict.fromkeys(listed)}
    return [known[name] for name in listed]


_plan_lab = functools.lru_cache(maxsize=256)(plan_lab)  # many cells share a network


def _check_network(cell: Cell, where: str) -> None:
    """Check, before the lab is built, that it can be laid out, and that its engine supports every pipe."""
    try:
        _plan_lab(**cell.lab, engine=cell.engine)
        for profile in cell.links if cell.engine == "relay" else ():
            for pipe in (profile.up, profile.down):
                refuse_unsupported(pipe)
    except SpecError as error:
        raise SpecError(f"{where}: network {cell.network}: {error}") from None
