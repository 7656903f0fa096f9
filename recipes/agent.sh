#!/bin/sh
# A program that is trained as it is: a row comes in, curl asks the model, the answer goes out.
#     es-cookbook train program="sh recipes/agent.sh" data=recipes/questions.jsonl batch=4 num_generations=10 \
#         reward=recipes/custom_reward.py:score model_name=es_cookbook/recipes/countdown/model
body=$(jq '{model: "policy", prompt: "\(.numbers)=\(.target)\n", max_tokens: 32}')
curl --silent "$OPENAI_BASE_URL/completions" --header "Authorization: Bearer $OPENAI_API_KEY" --data "$body" |
  jq --compact-output '{answer: .choices[0].text}'
