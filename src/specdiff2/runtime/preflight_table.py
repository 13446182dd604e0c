"""A preflight plan as text. Reads the plan's plain dictionary (``preflight.json``), computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Plan = Mapping[str, Any]


def render(plan: Plan) -> str:
    """The whole plan, ready to print."""
    hardware = plan["hardware"]
    lines = [
        f"preflight of {plan['script']}.py on {hardware['num_devices']} x {hardware['name']} "
        f"({hardware['memory_gib']:.1f} GiB, {hardware['bandwidth_gb_s']:.0f} GB/s, "
        f"{hardware['bf16_tflops']:.1f} TFLOPS bf16): nothing was loaded",
        "",
        *_model_lines("verifier", plan["verifier"]),
        *_model_lines("drafter", plan["drafter"]),
    ]
    for phase in plan["phases"]:
        lines += ["", *_phase_lines(phase)]
    if plan["cluster"]:
        lines += ["", *_cluster_lines(plan["cluster"])]
    for method in plan["decoding"]:
        lines += ["", *_method_lines(method, plan["verifier_alone"])]
    if plan["hours"]:
        lines += ["", "estimated hours, every rollout at full length:"]
        lines += [f"  {name:<32} {_number(hours)}" for name, hours in plan["hours"].items()]
    lines += ["", "assumed: " + "; ".join(plan["assumptions"])]
    lines += ["", *(f"WARNING {text}" for text in plan["warnings"])] if plan["warnings"] else ["", "no warnings"]
    return "\n".join(lines)


def _model_lines(role: str, model: Plan) -> list[str]:
    trained = f", {model['trained_parameters'] / 1e6:.1f} M trained" if "trained_parameters" in model else ""
    return [
        f"{role:<9} {model['source']}: {model['parameters'] / 1e9:.3f} B parameters{trained}, "
        f"{model['weights_gib']:.2f} GiB in {model['dtype']}, {model['kv_mib_per_token']:.3f} MiB of keys and values a "
        f"token",
        f"{'':<9} {model['told']}; sizes from: {model['shape_from']}",
    ]


def _phase_lines(phase: Plan) -> list[str]:
    verdict = "fits" if phase["fits"] else "DOES NOT FIT"
    count = phase["num_devices"]
    head = f"{phase['name']}, {count} device{'s' if count > 1 else ''}"
    lines = [f"{head}: {phase['total_gib']:.2f} of {phase['available_gib']:.1f} GiB on the fullest device: {verdict}"]
    lines += [f"  {name:<32} {size:9.3f} GiB" for name, size in phase["items_gib"].items() if size > 0.0]
    if count > 1:
        lines.append(f"  device 0: {phase['first_gib']:.2f} GiB, each other one: {phase['others_gib']:.2f} GiB")
    return lines


def _method_lines(method: Plan, alone: Plan) -> list[str]:
    lines = [
        f"{method['name']}: {method['gamma']} drafted positions, {method['num_nodes']} nodes a round; estimated ms: "
        f"draft {method['draft_ms']:.2f}, verify {method['verify_ms']:.2f}, other {method['other_ms']:.2f}; "
        f"pays above a mean streak of {max(method['break_even_streak'], 0.0):.2f}",
        f"  verifier alone: estimated {alone['tokens_per_s_estimate']:.1f} tokens/s, bound "
        f"{alone['tokens_per_s_bound']:.1f}",
        "  mean streak    tau   speed-up (estimate)   tokens/s (estimate)   tokens/s (bound)",
    ]
    for row in method["rows"]:
        lines.append(
            f"  {row['streak']:11.2f} {row['tau']:6.2f} {row['speedup']:21.2f} {row['tokens_per_s_estimate']:21.1f} "
            f"{row['tokens_per_s_bound']:18.1f}"
        )
    return lines


def _cluster_lines(cluster: Plan) -> list[str]:
    nodes, each = cluster["num_nodes"], cluster["ranks_per_node"]
    lines = [f"{cluster['strategy']} on {nodes} node(s) of {each} device(s); every device sends in a step:"]
    lines += [
        f"  {name:<32} {moved['gb']:9.3f} GB {moved['seconds']:8.3f} s" for name, moved in cluster["exchanges"].items()
    ]
    lines += [
        f"  verifier {cluster['verifier']}",
        f"  nodes  GPUs  GiB each  fits  host GiB  computing s  exchanging s  step s, hidden to not  windows a step  "
        f"hours of {cluster['max_steps']} steps  GPU-hours",
    ]
    for row in cluster["nodes"]:
        lines.append(
            f"  {row['num_nodes']:5d} {row['num_gpus']:5d} {row['gib_each']:9.2f}  {'yes' if row['fits'] else ' NO'} "
            f"{row['host_gib_per_node']:9.1f} {row['compute_s']:12.3f} {row['exchange_s']:13.3f} "
            f"{_span(row['step_s'], 3):>21} {row['windows_per_step']:15d} {_span(row['hours'], 1):>20} "
            f"{_span(row['gpu_hours'], 0):>12}"
        )
    paper, tokens = cluster["paper"], cluster["rollout_tokens"]
    lines.append(
        f"  the paper says at most {paper['gpu_hours']:.0f} GPU-hours for {paper['steps']} steps, "
        f"{paper['gpu_seconds_per_step']:.2f} GPU-seconds a step; {paper['steps']} steps as planned: "
        f"{_span(paper['our_gpu_hours'], 0)} GPU-hours, {_span(paper['our_gpu_seconds_per_step'], 2)} GPU-seconds; "
        f"a step of the paper's cost holds {_span(paper['windows_at_that_cost'], 0)} windows of this plan "
        f"(rollouts of up to {tokens} tokens, their sampling apart; the windows in one of its steps are not known here)"
    )
    return lines


def _span(bounds: Sequence[float], digits: int) -> str:
    return " - ".join(f"{value:.{digits}f}" for value in bounds)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:9.2f}"
