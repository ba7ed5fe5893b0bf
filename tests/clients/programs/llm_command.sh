# The `llm` command, told of the server as its documentation says.
set -euo pipefail
export LLM_USER_PATH="$1"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<MODELS
- model_id: penstock
  model_name: demo
  api_base: "$OPENAI_BASE_URL"
  api_key_name: penstock
MODELS
llm keys set penstock --value "$OPENAI_API_KEY"
llm -m penstock -o temperature 0 "What is the capital of France?"
llm -m penstock -o temperature 0 --no-stream "What is the capital of France?"
