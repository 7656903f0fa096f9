"""What a run needs, before anybody pays for GPUs: memory, tokens, and bytes sent and kept.

    python -m es_cookbook plan model_name=Qwen/Qwen2.5-7B-Instruct num_engines=8 engine=vllm

Only the model's config.json is read, and no GPU is needed. Options default to the main job's. The
numbers are those of `plan_numbers`. docs/multi_gpu.md is the guide.
"""

from es_cookbook.commands.plan.plan_config import PlanConfig
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import say


def main(config: PlanConfig) -> None:
    say(f"reading the config.json of {config.model_name}")
    # torch, which the options do without.
    from es_cookbook.commands.plan.plan_numbers import Plan, check, read_architecture, report

    plan = Plan(config, read_architecture(config.model_name))
    check(plan)
    print(report(plan))


def cli() -> None:
    run_cli(main, PlanConfig)
