# One target a habit. `make demo` and `make test` install what is missing (as root on Debian or Ubuntu).
.PHONY: help setup setup-test agent build demo demo-async test test-long test-cluster lint bench clean
CARGO ?= cargo
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup:           ## packages and libtorch for building
	@setup/setup.sh build

setup-test:      ## the same, and what the tests start (Slurm, MUNGE)
	@setup/setup.sh test

agent:           ## the static helper that runs inside sandboxes
	@setup/agent.sh

build: setup     ## release binaries in target/release
	$(CARGO) build --release --bins
	@setup/agent.sh

demo: build      ## train the demo policy on the demo tasks and show the reward rising
	@jobs/demo/run.sh configs/demo.env

demo-async: build ## the same with a trainer process and a rollout process
	@jobs/demo/run.sh configs/demo_async.env

test: setup-test ## every test that fits in 15 minutes on a built tree
	@tests/run.sh short

test-long: setup-test ## the whole list: three seeds, twenty kills, full Slurm runs, references from Python
	@tests/run.sh long

test-cluster: setup-test ## only the tests on a real Slurm and a real Kubernetes API server
	@tests/run.sh cluster

lint: setup      ## rustfmt and clippy, warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --lib --bins -- -D warnings
	$(CARGO) clippy -p legorl -p legorl-agent --all-targets -- -D warnings

bench: setup     ## micro benchmarks, side by side with what one would run instead
	$(CARGO) bench

clean:           ## build outputs; packages and libtorch stay
	$(CARGO) clean
