"""checkpoint -> an OpenAI-compatible server, until it is interrupted."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn

from dspark_train.config import Config
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.scheduler import Scheduler, make_scheduler
from dspark_train.serving.app import Limits, make_app
from dspark_train.serving.batching import Batcher
from dspark_train.serving.costs import engine_costs
from dspark_train.stages.decoders import open_decoder


def settings(config: Config) -> dict[str, Any]:
    """The groups of the configuration that are read here."""
    return {name: asdict(getattr(config, name)) for name in ("target", "serve")}


def run(config: Config) -> None:
    """Serve the checkpoint of this run, or `checkpoint`.

    Raises:
        ValueError: no checkpoint where the proposer needs one, or a port that is taken.
    """
    s = config.serve
    engine = make_engine(config)
    batcher = Batcher(
        engine, max_waiting=s.max_waiting, max_positions=s.max_positions, chunk=s.chunk
    )
    limits = Limits(
        s.max_new_tokens, s.max_prompt_tokens, s.max_choices, s.max_body_bytes, s.timeout
    )
    name = s.model or engine.target.name
    app = make_app(
        batcher,
        model=name,
        limits=limits,
        verdict=s.verdict,
        api_key=s.api_key,
        shutdown_seconds=s.shutdown_seconds,
    )
    print(f"serve      {name} with policy {s.policy} at http://{s.host}:{s.port}/v1", flush=True)
    try:
        uvicorn.run(
            app,
            host=s.host,
            port=s.port,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(s.shutdown_seconds)),
        )
    except SystemExit as error:  # uvicorn's way of saying that it could not bind
        raise ValueError(
            f"serve.host={s.host}, serve.port={s.port}: could not listen there; is the host an "
            "address of this machine, and the port free?"
        ) from error


def make_engine(config: Config) -> Engine:
    """Target, proposer and scheduler as configured."""
    s = config.serve
    decoder = open_decoder(config, s.proposer, s.target)
    engine = Engine(
        decoder.target, decoder.proposer, decoder.vocabulary, rows=s.rows, reads_ahead=True
    )
    slots, temperatures = proposer_facts(config, engine)
    costs = None
    if s.policy.split(":")[0] not in ("fixed", "threshold"):
        costs = measured(engine, slots, s.cost_table, s.cost_seconds)
    engine.scheduler = scheduler_of(s.policy, engine, slots, costs, temperatures)
    return engine


def scheduler_of(
    policy: str,
    engine: Engine,
    slots: int,
    costs: CostTable | None,
    temperatures: list[float] | None,
) -> Scheduler:
    """The policy as a server has it: costs and calibration follow what is served."""
    return make_scheduler(
        policy,
        slots,
        costs,
        temperatures,
        padded=engine.pads,
        watch=temperatures is not None,
        follow=True,
    )


def proposer_facts(config: Config, engine: Engine) -> tuple[int, list[float] | None]:
    """Drafts of a proposal, and the temperatures of their confidences."""
    if not isinstance(engine.proposer, BlockProposer):
        return (0 if config.serve.proposer == "plain" else config.serve.slots), None
    shape = engine.proposer.drafter.config
    return shape.slots.num_proposals, shape.confidence_temperatures


def measured(engine: Engine, slots: int, file: str | None, seconds: float) -> CostTable:
    """The table in `file`; where there is none yet, it is measured, and kept there."""
    if file is not None and Path(file).is_file():
        return CostTable.load(file)
    if file is not None and not Path(file).parent.is_dir():
        raise ValueError(f"serve.cost_table={file}: there is no folder {Path(file).parent}")
    print(f"{'costs':<10} timing rounds of every size for about {seconds:g} s", flush=True)
    costs = engine_costs(engine, slots, budget=seconds)
    if file is not None:
        costs.save(file)
    return costs
