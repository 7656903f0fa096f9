"""Train on your own reward function: the answer should come at once.

    python recipes/custom_reward.py
    python recipes/custom_reward.py num_generations=20 optimizer.sigma=0.005

The bundled Countdown model thinks before it answers. The reward is higher the fewer characters come
before `<answer>`. The same from the command line, with `score` in a file:

    es-cookbook train data=recipes/questions.jsonl prompt="{numbers}={target}
    " reward=recipes/custom_reward.py:score model_name=es_cookbook/recipes/countdown/model
"""

from collections.abc import Mapping
from pathlib import Path

from es_cookbook import ES, Config, SamplingParams, Task, main
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL


def score(text: str, row: Mapping[str, object]) -> float:
    del row  # Independent of the question.
    thought, found, _ = text.partition("<answer>")
    return 10 / (10 + len(thought)) if found else 0.0


if __name__ == "__main__":
    questions = Path(__file__).with_name("questions.jsonl")
    main(
        Config(
            model_name=str(BUNDLED_MODEL),
            dataset=Task(source=str(questions), prompt="{numbers}={target}\n", reward=score),
            optimizer=ES(population_size=64, sigma=0.01, learning_rate=0.02),
            sampling=SamplingParams(max_tokens=32),
            num_generations=10,
            log_path="runs/custom-reward",
        )
    )
