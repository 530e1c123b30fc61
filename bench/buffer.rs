//! Buffer throughput: durable appends against plain `write` + `fdatasync`, and reading a batch against
//! `memcpy` of the same bytes.
//!
//! `cargo bench --bench buffer [-- DIR]` writes some hundred MB below DIR (default: the temporary folder)
//! and prints one line a scenario. MB are 10^6 bytes.

use legorl::base::{
    PolicyVersion, StopReason, TokenSequence, Trajectory, TrialAssignment, TrialEnd, TrialOutcome, TrialPlan,
    TrialPlanStep, TrialSink, TrialTiming,
};
use legorl::train::buffer::{Buffer, BufferConfig};
use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const N_RESP: u32 = 8;
const TRAIN_BSZ: u32 = 16;

fn trajectory(trial: &TrialAssignment, tokens: usize) -> Trajectory {
    let sampled = |i: usize| i >= 2000 && i.is_multiple_of(4);
    Trajectory {
        key: trial.key,
        attempt: 0,
        task: "a-task-of-the-usual-length".to_owned(),
        session: "a-session__with-a-name".to_owned(),
        outcome: TrialOutcome {
            reward: 1.0,
            rewards: BTreeMap::from([("reward".to_owned(), 1.0)]),
            stop: StopReason::AgentCompleted,
        },
        sequences: vec![TokenSequence {
            token_ids: (0..tokens as u32)
                .map(|i| i.wrapping_mul(2_654_435_761) >> 14)
                .collect(),
            loss_mask: (0..tokens).map(sampled).collect(),
            logprobs: (0..tokens)
                .map(|i| {
                    if sampled(i) {
                        -((i % 977) as f32) / 100.0
                    } else {
                        0.0
                    }
                })
                .collect(),
            versions: (0..tokens)
                .map(|i| u32::from(sampled(i)) * trial.attempt)
                .collect(),
            prompt_len: 2000,
            weight: 1.0,
            routing: None,
        }],
        turns: 30,
        malformed_tool_calls: 0,
        timing: TrialTiming::default(),
    }
}

/// Wall time and processor time of all threads. On a busy machine the second one is the honest figure.
struct Watch {
    since: Instant,
    cpu: Duration,
}

impl Watch {
    fn start() -> Self {
        Self {
            since: Instant::now(),
            cpu: cpu_time(),
        }
    }

    fn report(self, name: &str, bytes: usize, times: usize) {
        let (wall, cpu) = (
            self.since.elapsed().as_secs_f64(),
            (cpu_time() - self.cpu).as_secs_f64(),
        );
        println!(
            "{name:<36} {:>8.1} MB/s {:>8.3} ms each | processor {:>8.1} MB/s {:>8.3} ms each",
            bytes as f64 / wall / 1e6,
            wall * 1e3 / times as f64,
            bytes as f64 / cpu.max(1e-6) / 1e6,
            cpu * 1e3 / times as f64,
        );
    }
}

fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: a valid place to write to; zeroes are a valid rusage as well.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn open(dir: &Path, name: &str) -> Arc<Buffer> {
    Buffer::open(
        BufferConfig {
            dir: dir.join(name),
            n_resp: N_RESP,
            train_bsz: TRAIN_BSZ,
            staleness: 0.0,
            total_steps: 1,
            n_rows: 100,
            seed: 1,
            max_attempts: 1,
            roll_bytes: 1 << 30,
        },
        None,
    )
    .expect("the buffer opens")
}

fn scenario(dir: &Path, tokens: usize) {
    let trials = (N_RESP * TRAIN_BSZ) as usize;
    println!("\n{trials} trials of {tokens} tokens");
    let mut record_bytes = 0;
    for threads in [1, 8] {
        let name = format!("buffer-{tokens}-{threads}");
        let buffer = open(dir, &name);
        let assignments: Vec<TrialAssignment> = std::iter::from_fn(|| match buffer.next() {
            TrialPlanStep::Run(trial) => Some(trial),
            _ => None,
        })
        .collect();
        let ends: Vec<TrialEnd> = assignments
            .iter()
            .map(|trial| TrialEnd::Finished(trajectory(trial, tokens)))
            .collect();
        let mut shares: Vec<Vec<TrialEnd>> = (0..threads).map(|_| Vec::new()).collect();
        for (i, end) in ends.into_iter().enumerate() {
            shares[i % threads].push(end);
        }
        let watch = Watch::start();
        std::thread::scope(|scope| {
            for share in shares {
                let buffer = &buffer;
                scope.spawn(move || {
                    for end in share {
                        buffer.submit(end).expect("stored");
                    }
                });
            }
        });
        let bytes = buffer.status().shard_bytes as usize;
        record_bytes = bytes / trials;
        watch.report(&format!("append, durable, {threads} thread(s)"), bytes, trials);
        if threads == 8 {
            read(&buffer, bytes, trials);
        }
        drop(buffer);
        if threads == 8 {
            let watch = Watch::start();
            let buffer = open(dir, &name);
            watch.report("open: scan with checksums", bytes, trials);
            drop(buffer);
        }
        std::fs::remove_dir_all(dir.join(&name)).expect("it is ours");
    }
    baselines(dir, record_bytes, trials);
}

fn read(buffer: &Buffer, bytes: usize, trials: usize) {
    for what in ["first", "again"] {
        let watch = Watch::start();
        let batch = buffer
            .next_batch(1, Instant::now() + Duration::from_secs(60))
            .expect("complete");
        watch.report(&format!("next_batch, {what}"), bytes, trials);
        assert_eq!(batch.groups.len(), TRAIN_BSZ as usize);
    }
    buffer.step_done(PolicyVersion(1)).expect("in order");
}

fn baselines(dir: &Path, record_bytes: usize, trials: usize) {
    let record = vec![7u8; record_bytes];
    let path = dir.join("plain");
    let mut file = File::create(&path).expect("writable");
    let watch = Watch::start();
    for _ in 0..trials {
        file.write_all(&record).expect("room");
        file.sync_data().expect("durable");
    }
    watch.report("plain write + fdatasync each", record_bytes * trials, trials);
    let mut file = File::create(&path).expect("writable");
    let watch = Watch::start();
    for _ in 0..trials {
        file.write_all(&record).expect("room");
    }
    file.sync_data().expect("durable");
    watch.report("plain write, one fdatasync", record_bytes * trials, trials);
    std::fs::remove_file(&path).expect("it is ours");
    let source = vec![1u8; record_bytes * trials];
    let watch = Watch::start();
    let copies: Vec<Vec<u8>> = source.chunks(record_bytes).map(<[u8]>::to_vec).collect();
    watch.report("memcpy to fresh memory", source.len(), trials);
    std::hint::black_box(copies);
}

fn main() {
    let folder = std::env::args()
        .nth(1)
        .filter(|argument| !argument.starts_with("--"));
    let base = folder.map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(base).expect("a folder");
    for tokens in [4_000, 32_000, 128_000] {
        scenario(dir.path(), tokens);
    }
}
