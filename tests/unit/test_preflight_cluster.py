"""Plans of several devices and nodes, against numbers worked out by hand: a drafter of 1000 weights on 2 or 8 ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny_verifier
from preflight_plans import HARDWARE, a_drafter, a_verifier, settings, shape, tiny_config

from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.runtime.preflight_cluster import (
    Step,
    cluster_section,
    exchange_seconds,
    exchanged_bytes,
    paper_section,
    step_of,
)
from specdiff2.runtime.preflight_memory import held_out_phase, host_bytes, model_states, packed_size, training_phase
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, read_drafter
from specdiff2.runtime.preflight_speed import Method, draft_pass, round_cost, speed_of, step_seconds
from specdiff2.runtime.preflight_strategy import BUCKET, read_offload

LORA = {"rank": 4, "alpha": 4, "dropout": 0.0, "targets": ["q_proj"]}


def thousand(lora: Any = None, trained: int = 1000) -> DrafterSettings:
    """1000 weights in all; with ``lora`` frozen, and ``trained`` of adapters beside them."""
    found = replace(shape(tiny_config()), num_parameters=1000, num_embedding=0, num_head=0)
    return a_drafter(shape=found, num_trained=trained, lora=lora, weights="bfloat16")


def training(strategy: str, ranks: int = 2, nodes: int = 1, **changes: Any) -> TrainingSettings:
    return settings(mixed=True, strategy=strategy, num_ranks=ranks, num_nodes=nodes, **changes)


def device(drafter: DrafterSettings, chosen: TrainingSettings) -> list[float]:
    states = model_states(drafter, chosen)
    return [states[name] for name in ("drafter weights", "gradients", "optimizer")]


# ---------------------------------------------------------------- bytes of a device and of the host
@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer", "buffers"),
    [
        # bfloat16 weights 2 bytes, gradients 2 or, partitioned, 4; float32 copy and two moments 12 bytes; two ranks
        ("zero1", 2000, 2000, 6000, 6000),
        ("zero2", 2000, 2000, 6000, 6000),
        ("zero3", 1000, 2000, 6000, 4000),
        # float32 weights, gradients and two moments, all halved; cast where they are gathered
        ("fsdp", 2000, 2000, 4000, 4000),
    ],
)
def test_two_ranks_by_hand(strategy: str, weights: int, gradients: int, optimizer: int, buffers: int) -> None:
    states = model_states(thousand(), training(strategy))
    assert device(thousand(), training(strategy)) == [weights, gradients, optimizer]
    assert states["communication buffers"] == buffers  # a bucket holds all 1000: 2 of them, and one to gather into
    assert states["gathered weights"] == (2000 if strategy in ("zero3", "fsdp") else 0)


def test_ddp_and_adapters_by_hand() -> None:
    """100 float32 adapter weights (4 + 4 + 4 of buckets + 8 bytes) beside 1000 frozen bfloat16 ones."""
    assert device(thousand(LORA, 100), training("ddp")) == [2000 + 400, 800, 800]
    assert device(thousand(LORA, 100), training("zero3")) == [1100, 200, 600]  # frozen weights are divided too
    assert device(thousand(LORA, 100), training("zero2")) == [2200, 200, 600]


def test_embedding_and_head_stay_whole_and_layers_come_and_go() -> None:
    """Of 3 billion weights in layers ZeRO-3 keeps one billion at once, beside 200 of embedding and head."""
    huge = replace(shape(tiny_config()), num_parameters=3 * 10**9 + 200, num_embedding=150, num_head=50)
    states = model_states(a_drafter(shape=huge, num_trained=huge.num_parameters), training("zero3", 8))
    assert states["gathered weights"] == 2 * (10**9 + 200)


def test_buckets_are_bounded() -> None:
    large = a_drafter(num_trained=10**9)
    assert model_states(large, training("zero2"))["communication buffers"] == 3 * 2 * BUCKET
    assert model_states(large, training("zero3"))["communication buffers"] == 2 * 2 * BUCKET
    small = model_states(large, training("zero3", reduce_bucket=10))
    assert small["communication buffers"] == 2 * 2 * 10


def test_offloading_moves_bytes_to_the_host() -> None:
    """8 ranks on 2 nodes: of 16 bytes a weight each node holds half, and of 2 bytes of weights as well."""
    optimizer = training("zero2", 8, 2, offload_optimizer=True)
    everything = training("zero3", 8, 2, offload_optimizer=True, offload_weights=True)
    assert device(thousand(), optimizer) == [2000, 0, 0] and device(thousand(), everything) == [0, 0, 0]
    assert host_bytes(thousand(), optimizer) == 8000
    assert host_bytes(thousand(), everything) == 8000 + 1000
    assert host_bytes(thousand(), training("zero3", 8, 2)) == host_bytes(thousand(), training("ddp", 8, 2)) == 0


def test_all_weights_lie_on_each_rank_while_it_evaluates() -> None:
    """1000 weights, two ranks: states as in training; whole weights in bfloat16, under FSDP in float32."""
    for strategy, whole, states in (("zero3", 2000, 9000), ("fsdp", 4000, 8000)):
        items = held_out_phase(a_verifier(), thousand(), training(strategy, verifier_stays=False)).items
        assert items["whole weights"] == whole and sum(items[name] for name in ("drafter weights", "gradients",
                                                                              "optimizer")) == states  # fmt: skip
        assert not {"gathered weights", "activations", "verifier weights"} & items.keys()
    adapters = held_out_phase(a_verifier(), thousand(LORA, 100), training("fsdp")).items
    assert adapters["whole weights"] == 2000 + 400


def test_every_rank_loads_its_own_spread_verifier() -> None:
    spread, weights = a_verifier("layers", 4), a_verifier().weight_bytes
    for ranks, nodes, copies in ((1, 1, 1), (4, 1, 4), (8, 2, 4)):
        phase = training_phase(spread, a_drafter(), training("zero3", ranks, nodes))
        assert phase.items["verifier weights"] == pytest.approx(copies * weights / 4)
    alone = training_phase(a_verifier(), a_drafter(), training("zero3", 8, 2))
    assert alone.items["verifier weights"] == weights


# ---------------------------------------------------------------- exchanges
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one", {}),
        # rings of 2: half of a tensor passes to gather or to reduce-scatter it; 2 micro-batches a step
        ("ddp", {"all-reduce of gradients": 4000}),
        ("zero1", {"reduce-scatter of gradients": 1000, "all-gather of new weights": 1000}),
        ("zero2", {"reduce-scatter of gradients": 2000, "all-gather of new weights": 1000}),
        ("zero3", {"all-gather of weights": 4000, "reduce-scatter of gradients": 2000}),
        ("fsdp", {"all-gather of weights": 4000, "reduce-scatter of gradients": 4000}),
    ],
)
def test_exchanges_of_two_ranks_by_hand(strategy: str, expected: dict[str, float]) -> None:
    chosen = training(strategy, 1 if strategy == "one" else 2, accumulate=2)
    assert exchanged_bytes(thousand(), chosen) == expected


def test_adapters_exchange_little_but_gather_the_frozen_weights() -> None:
    """8 ranks: seven eighths pass."""
    drafter = thousand(LORA, 80)
    assert exchanged_bytes(drafter, training("ddp", 8)) == {"all-reduce of gradients": 2 * 7 / 8 * 80 * 4}
    zero3 = exchanged_bytes(drafter, training("zero3", 8))
    assert zero3 == {"all-gather of weights": 2 * 7 / 8 * 1080 * 2, "reduce-scatter of gradients": 7 / 8 * 80 * 2}


def test_seconds_of_exchanges() -> None:
    """300 GB/s within a node, 25 GB/s for each device out of it, a share of 0.8 of both."""
    assert exchange_seconds(240e9, HARDWARE, training("ddp", 8)) == pytest.approx(1.0)
    assert exchange_seconds(240e9, HARDWARE, training("ddp", 16, 2)) == pytest.approx(240 / (8 * 25 * 0.8))
    assert exchange_seconds(240e9, HARDWARE, training("ddp", 2, 2)) == pytest.approx(240 / (25 * 0.8))
    many = replace(HARDWARE, network_gb_s=100.0)  # 800 GB/s out of the node: its inside is the narrower part
    assert exchange_seconds(240e9, many, training("ddp", 16, 2)) == pytest.approx(1.0)


def test_bounds_of_a_step() -> None:
    assert Step(2.0, 0.5).bounds_s == (2.0, 2.5) and Step(0.5, 2.0).bounds_s == (2.0, 2.5)


def test_accumulation_repeats_the_arithmetic() -> None:
    one, four = (step_of(thousand(), training("ddp", accumulate=times), HARDWARE) for times in (1, 4))
    assert four.compute_s == pytest.approx(4 * one.compute_s) and four.exchange_s == one.exchange_s
    alone = step_of(thousand(), training("one", 1), HARDWARE)
    assert alone.exchange_s == 0.0 and alone.compute_s == one.compute_s


# ---------------------------------------------------------------- the table and the paper
def test_one_device_has_no_cluster() -> None:
    assert cluster_section(HARDWARE, a_verifier(), a_drafter(), training("one", 1)) is None


def test_rows_of_nodes() -> None:
    """3 nodes of 2 devices, 2 x 8 windows on each of them, 3600 steps: hours are seconds."""
    chosen = training("zero3", 6, 3, max_steps=3600, verifier_stays=False)
    found = cluster_section(HARDWARE, a_verifier(), thousand(), chosen)
    assert found is not None
    assert [row["num_nodes"] for row in found["nodes"]] == [1, 2, 3, 4, 8]
    assert [row["num_gpus"] for row in found["nodes"]] == [2, 4, 6, 8, 16]
    assert [row["windows_per_step"] for row in found["nodes"]] == [32, 64, 96, 128, 256]
    third, speed = found["nodes"][2], speed_of(HARDWARE, "bfloat16", peak=False)
    assert third["exchanged_gb"] == pytest.approx((2 * 5 / 6 * 2000 + 5 / 6 * 2000) / 1e9)
    assert third["compute_s"] == step_seconds(thousand(), chosen, speed)
    assert third["hours"] == pytest.approx(third["step_s"])
    assert third["gpu_hours"] == pytest.approx([6 * hours for hours in third["hours"]])
    assert sum(part["seconds"] for part in found["exchanges"].values()) == pytest.approx(third["exchange_s"])
    shrinking = [row["gib_each"] for row in found["nodes"]]
    assert shrinking == sorted(shrinking, reverse=True)


def test_the_papers_number() -> None:
    """75 GPU-hours of 60,000 steps are 4.5 GPU-seconds a step: half of 9, so half of the windows."""
    row = {"num_gpus": 3, "step_s": [2.0, 3.0], "windows_per_step": 12}
    found = paper_section(row)
    assert found["gpu_seconds_per_step"] == 4.5
    assert found["our_gpu_seconds_per_step"] == [6.0, 9.0] and found["our_gpu_hours"] == [100.0, 150.0]
    assert found["windows_at_that_cost"] == [6.0, 9.0]


# ---------------------------------------------------------------- offload settings
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", (False, False)), ("deepspeed_stage_3", (False, False)), ("deepspeed_stage_2_offload", (True, False)),
        ("deepspeed_stage_3_offload", (True, True)), ("fsdp_cpu_offload", (True, True)),
        ({"_target_": "x.DeepSpeed", "stage": 2, "offload_optimizer": True}, (True, False)),
        ({"_target_": "x.DeepSpeed", "stage": 3, "offload_parameters": True}, (False, True)),
        ({"_target_": "x.FSDPStrategy", "cpu_offload": True}, (True, True)),
    ],
)  # fmt: skip
def test_offloads(value: Any, expected: tuple[bool, bool]) -> None:
    assert read_offload(value) == expected


# ---------------------------------------------------------------- EAGLE heads
def eagle(config: Any, num_layers: int = 1) -> DrafterSettings:
    target = "specdiff2.models.eagle_drafter.EagleDrafter.from_verifier"
    node = {"_target_": target, "gamma": 3, "num_layers": num_layers}
    return read_drafter({"model": node, "data": None}, shape(config), HARDWARE)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle_heads_are_counted_as_they_are_built(num_layers: int) -> None:
    verifier = tiny_verifier()
    real = EagleDrafter.from_verifier(verifier, num_layers=num_layers)
    found = eagle(verifier.config, num_layers)
    assert found.num_trained == found.shape.num_parameters == sum(p.numel() for p in real.parameters())
    assert (found.kind, found.attention, found.borrows) == ("eagle", "causal_prefix", True)


def test_eagle_heads_train_on_every_token_and_the_unrolled_steps() -> None:
    """2 rollouts of 96 tokens, 8 windows of 3 positions: the first is a token's own step, two more are unrolled."""
    assert packed_size(eagle(tiny_config()), settings(mixed=True)) == (2, 96 + 8 * 2, 96 + 8 * 2)


def test_eagle_heads_draft_in_a_pass_for_every_level() -> None:
    """25 nodes in 5 levels: 5 passes of 5 positions each."""
    speed, head, verifier = speed_of(HARDWARE, "bfloat16", peak=False), eagle(tiny_config()), a_verifier()
    found = round_cost(verifier, head, Method("eagle", 5, 26), 100, 2.0, speed, 0.0)
    one = draft_pass(head, verifier, 5, 100, 2.0)
    assert found.draft_s == pytest.approx(5 * max(one.read_bytes / speed.bandwidth, speed.layer_overhead_s))
