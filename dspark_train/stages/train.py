"""features -> drafter: the backbone, and the heads with it when the schedule is joint."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from dspark_train import ranks
from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.bigrams import bigram_factors
from dspark_train.data.datamodule import split_validation
from dspark_train.data.vocabulary import frequent_tokens
from dspark_train.decoding.sampling import usable_vocabulary
from dspark_train.disk import check_space
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.stages.features import Features, open_features
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import device, load_target, require_same_target
from dspark_train.target import Target, TargetHead
from dspark_train.target.mask_token import default_mask_token
from dspark_train.training.fit import Decoding, fit
from dspark_train.training.validation import decoder

# float32 weights and two moments in a training checkpoint, a new one beside it, the result
BYTES_PER_PARAMETER = 2 * 12 + 4
SHARED = True
IGNORED = ("workers", "checkpoint_minutes", "micro_documents", "strategy", "compile")
IGNORED += ("checkpoint_activations",)
# whose bias is a product of two factors; a recurrent one has something between them
FROM_BIGRAMS = ("vanilla", "gated")
IGNORED_BY_TRAINER = ("devices", "num_nodes", "accelerator", "strategy")


def inputs(config: Config) -> tuple[str, ...]:
    return ("capture",)


def settings(config: Config) -> dict[str, Any]:
    return {
        "schedule": config.schedule,
        "drafter": asdict(config.drafter),
        "objective": asdict(config.objective),
        "train": train_settings(config),
    }


def train_settings(config: Config) -> dict[str, Any]:
    """What of `train` determines the weights: not how the work is shared out, loaded and saved."""
    kept = {key: value for key, value in asdict(config.train).items() if key not in IGNORED}
    trainer = {k: v for k, v in kept["trainer"].items() if k not in IGNORED_BY_TRAINER}
    return kept | {"trainer": trainer}


def drafter_config(config: Config, target: Target, facts: Mapping[str, Any]) -> DrafterConfig:
    """The drafter's shape: settings where given, else the target's; taps from the features.

    Raises:
        ValueError: settings that contradict each other or the target.
    """
    d, like = config.drafter, target.model.config.get_text_config()
    heads = d.num_attention_heads or like.num_attention_heads
    mask = default_mask_token(target) if d.mask_token_id is None else d.mask_token_id
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=d.intermediate_size
        or getattr(like, "intermediate_size", None)
        or 4 * target.hidden_size,
        num_hidden_layers=d.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=d.num_key_value_heads
        or getattr(like, "num_key_value_heads", None)
        or heads,
        head_dim=d.head_dim or getattr(like, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=getattr(like, "rms_norm_eps", 1e-6),
        # only the base of the target's rotary embedding: scaled, partial and multimodal variants
        # are the target's affair, its features already carry what they encode
        rope_parameters=_rotary(d.rotary_share, d.rope_theta or _rope_base(like)),
        max_position_embeddings=target.max_positions,
        vocab_size=target.vocab_size,
        block_size=d.block_size,
        sample_from_anchor=d.sample_from_anchor,
        mask_token_id=mask,
        target_layer_ids=list(facts["taps"]),
        num_target_layers=target.num_layers,
        markov_head_type=d.markov_head_type,
        markov_rank=d.markov_rank,
        enable_confidence_head=d.enable_confidence_head,
        confidence_head_with_markov=d.confidence_head_with_markov,
        conv_kernel_size=d.conv_kernel_size,
        conv_group_size=d.conv_group_size,
        selector_top_k=d.selector_top_k,
        draft_vocab_size=d.draft_vocab_size,
        sliding_window=d.sliding_window,
        layer_types=d.layer_types,
        window_from=d.window_from,
        causal_blocks=d.causal_blocks,
        hidden_act=d.hidden_act,
        sandwich_norms=d.sandwich_norms,
        value_norm=d.value_norm,
        keys_are_values=d.keys_are_values,
        attention_scale=d.attention_scale,
        target={**facts["target"], "head": target.head.facts},
    )


def _rotary(share: float | None, base: float) -> dict[str, Any]:
    if share is None:
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share}


def _rope_base(like: PretrainedConfig) -> float:
    """Base of the target's rotary embedding, of its full layers where it has several kinds."""
    rope = getattr(like, "rope_parameters", None) or {}
    return rope.get("full_attention", rope).get("rope_theta", 10_000.0)


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Train from scratch, or continue from the last checkpoint of the same work."""
    capture = inputs["capture"]
    target = load_target(config)
    require_same_target(target, capture.facts["target"], str(capture.directory))
    store = open_features(config, capture, target)
    drafter, kept = new_drafter(config, target, store, capture.facts)
    head, decode = target.head, decoding(config, target)
    del target  # unless it computes features or decodes, the rest of it need not stay in memory
    outcome = train_part(
        config,
        writer,
        drafter,
        head,
        store,
        part="all" if config.schedule == "joint" else "backbone",
        epochs=config.train.epochs,
        lr=config.train.lr,
        decode=decode,
    )
    if kept is None:
        return outcome
    size = drafter.config.draft_vocab_size
    line = f"{outcome.line}, {size:,} draft tokens that are {100 * kept:.2f} % of the responses"
    facts = {"draft_vocabulary": {"size": size, "share": round(kept, 6)}}
    return replace(outcome, line=line, facts=outcome.facts | facts)


def new_drafter(
    config: Config, target: Target, store: Features, facts: Mapping[str, Any]
) -> tuple[Drafter, float | None]:
    """A drafter with its first weights, which the seed decides.

    Args:
        facts: of the capture.

    Returns:
        The drafter; and if it has a vocabulary of its own, that one's share of the responses.
    """
    torch.manual_seed(config.train.seed)
    drafter, kept = Drafter(drafter_config(config, target, facts)), None
    if size := drafter.config.draft_vocab_size:
        usable = usable_vocabulary(target.tokenizer, target.vocab_size)
        ids, kept = frequent_tokens(store, size, usable)
        drafter.draft_only(ids)
    if config.train.markov_from == "bigrams" and drafter.config.markov_head_type in FROM_BIGRAMS:
        documents, _ = split_validation(store.identities, config.train.validation)
        rank = drafter.config.markov_rank
        drafter.markov_head.start_from(
            *bigram_factors(store, documents, target.vocab_size, rank), drafter.draft_ids
        )
    return drafter, kept


def decoding(config: Config, target: Target) -> Decoding | None:
    """What measures real decoding in validation, if that is wanted; it keeps the target."""
    if not config.train.decode_validation:
        return None
    return lambda prompts: decoder(target, prompts, config.train.decode_tokens)


def train_part(
    config: Config,
    writer: ArtifactWriter,
    drafter: Drafter,
    head: TargetHead,
    store: Features,
    *,
    part: str,
    epochs: int,
    lr: float,
    decode: Decoding | None,
) -> Outcome:
    """Fit a part of the drafter, on all processes, and save it as the stage's artifact."""
    where = device(config)
    if config.train.attention == "flex" and where.type != "cuda":
        raise ValueError(
            f"train.attention=flex needs a CUDA device, and training runs on {where}: take "
            "train.attention=auto, or target.device=cuda"
        )
    if ranks.first():
        store.verify()
        parameters = sum(p.numel() for p in drafter.parameters())
        check_space(writer.directory, parameters * BYTES_PER_PARAMETER, "the training")
    trained, numbers = fit(
        config,
        drafter,
        head,
        store,
        part=part,
        epochs=epochs,
        lr=lr,
        writer=writer,
        device=where,
        decode=decode,
    )
    if ranks.first():
        writer.write("drafter", trained.save_pretrained)
        writer.add("logs/metrics.csv")
    tau = numbers["metrics"].get("validation/tau")
    line = f"{numbers['steps']} steps over {len(store)} documents"
    if numbers["kept_step"] != numbers["steps"]:
        line += f", weights of step {numbers['kept_step']}"
    return Outcome(
        counts={"documents": len(store), "tokens": store.num_tokens, **numbers},
        facts={"part": part, "drafter": trained.config.to_dict()},
        line=line + (f", expected τ {tau:.3f} on validation" if tau else ""),
    )
