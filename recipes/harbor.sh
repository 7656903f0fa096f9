#!/bin/sh
# Train on Harbor's tasks: a trial of one is an episode. Harbor is installed on its own, with Python 3.12 or later.
#     es-cookbook train program="sh recipes/harbor.sh --env docker" data=tasks.jsonl dataset.at_once=4 \
#         rollout_timeout=1800 turn_timeout=600 model_name=Qwen/Qwen2.5-0.5B-Instruct
# A row names the task's directory: {"task": "tasks/hello"}. Harbor's agent terminus-2 asks the model, its verifier gives the
# reward, and further options of `harbor trial start` follow the program.
trials=$(mktemp -d)
trap 'rm -r "$trials"' EXIT
harbor trial start --path "$(jq --raw-output .task)" --trials-dir "$trials" --agent terminus-2 --model openai/policy \
  --base-url "$OPENAI_BASE_URL" --api-key-name OPENAI_API_KEY --agent-kwarg record_terminal_session=false "$@" >&2
jq --exit-status --compact-output '.verifier_result.rewards | select(.) | {reward, metrics: .}' "$trials"/*/result.json
