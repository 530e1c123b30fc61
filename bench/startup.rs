//! Start-up: `legorl-rank --structure-only configs/demo.env` from the start of the process to its exit.
//!
//! `cargo bench -p legorl-front --bench startup` prints one line a scenario: smallest, median and 95th
//! percentile of the wall time, and the processor time of the program per run. The wall time of a busy
//! machine says little; the smallest one and the processor time do.
//!
//! Beside it stand `true` (what starting any process costs) and `bash -c :` (what the original's runner
//! costs before its first line). `LEGORL_ORIGINAL=DIR`, a checkout of the original, adds the part of its
//! preflight that needs no Python environment: reading its demo config and modules in bash and sourcing
//! its check script. Its runner starts Python as well, which is not measured here.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const RUNS: usize = 200;
const WARM_UP: usize = 5;

/// What the original's runner does in bash between its arguments and its verdict.
const ORIGINAL: &str = r#"set -euo pipefail
export REPO_ROOT=$1 TEMPLATE_ROOT=$1/scripts/templates
source "$1/scripts/lib/model_traits.sh"
set -a
source "$1/scripts/train/examples/demo.env"
for module in "${TEMPLATE_MODULES[@]}"; do source "$TEMPLATE_ROOT/$module"; done
set +a
export PF_STRUCTURE_ONLY=1 PREFLIGHT_EMBEDDED=1 USE_NEW_VERL=1 ENGINE=$MODEL_ENGINE TOOL_PARSER=$TOOL_CALL_PARSER
export IMAGE_REGISTRY=$HARBOR_OPENSWE_IMAGE_REGISTRY INLINE_BUILD=$HARBOR_K8S_INLINE_BUILD
export VAL_TIMEOUT=$HARBOR_VAL_AGENT_MAX_TIMEOUT_SEC TRAIN_INDEX=$TRAIN_FILES VAL_INDEX=$VAL_FILES
source "$1/scripts/lib/preflight.sh"
"#;

/// Processor time of all children that have ended.
fn children() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is large enough for one rusage, which the call fills; all zeros are a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| Duration::from_micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn measure(name: &str, make: impl Fn() -> Command) {
    let once = || {
        let begun = Instant::now();
        let status = make()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(status.success(), "{name} ends with {status}");
        begun.elapsed()
    };
    for _ in 0..WARM_UP {
        once();
    }
    let before = children();
    let mut times: Vec<Duration> = (0..RUNS).map(|_| once()).collect();
    let processor = (children() - before) / RUNS as u32;
    times.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{name:<46} min {:7.2} ms  median {:7.2} ms  p95 {:7.2} ms  processor {:7.2} ms",
        ms(times[0]),
        ms(times[RUNS / 2]),
        ms(times[RUNS * 95 / 100]),
        ms(processor)
    );
}

fn main() {
    let repository: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("front/ lies in the repository")
        .into();
    let program = env!("CARGO_BIN_EXE_legorl-rank");
    let legorl = |arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&repository);
        command
    };
    measure("true", || Command::new("true"));
    measure("legorl-rank --structure-only configs/demo.env", || {
        legorl(&["--structure-only", "configs/demo.env"])
    });
    measure("legorl-rank config show configs/demo.env", || {
        legorl(&["config", "show", "configs/demo.env"])
    });
    measure("bash -c :", || {
        let mut command = Command::new("bash");
        command.args(["--norc", "-c", ":"]);
        command
    });
    match std::env::var_os("LEGORL_ORIGINAL") {
        Some(original) => measure("original: config, modules, checks in bash", || {
            let mut command = Command::new("bash");
            command.args(["--norc", "-c", ORIGINAL, "bash"]).arg(&original);
            command
        }),
        None => println!("SKIP the original's checks: set LEGORL_ORIGINAL to a checkout of it"),
    }
}
