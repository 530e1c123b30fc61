//! What the end-to-end tests share: a starting policy made once, a run of the demo in a folder of its own,
//! and readers of what a run leaves behind.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Folder of the binaries under test: test programs lie in `deps/` below it.
pub fn bin_dir() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .to_owned()
}

/// The binary under test.
pub fn legorl_rank() -> Command {
    let mut command = Command::new(bin_dir().join("legorl-rank"));
    command.current_dir(root()).env("NO_COLOR", "1");
    command
}

/// True in `make test-long`.
pub fn long() -> bool {
    std::env::var("LEGORL_TEST_LEVEL").is_ok_and(|l| l == "long")
}

/// Says in the test's output that something was not tested and why.
pub fn skip(what: &str, why: &str) {
    eprintln!("SKIP {what}: {why}");
}

/// One at a time: end-to-end tests use both cores. Held until dropped.
pub struct Turn(#[allow(dead_code, reason = "the lock goes with the file")] File);

impl Turn {
    /// Waits for its turn, over all test processes of this checkout.
    pub fn take() -> Self {
        Self(locked("end-to-end.lock"))
    }
}

fn scratch() -> PathBuf {
    let dir = root().join("target/test-data");
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn locked(name: &str) -> File {
    let file = File::create(scratch().join(name)).unwrap();
    // SAFETY: flock takes an open descriptor, which `file` owns for the whole call.
    assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
    file
}

/// Runs a command to its end and fails with all that it printed when it does not succeed.
pub fn must(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success(),
        "{command:?} ended with {}:\n{text}",
        output.status
    );
    text
}

/// Index of the demo tasks and the starting policy of `seed`, made once per build of the binary.
pub fn demo_inputs(seed: u64) -> DemoInputs {
    demo_inputs_of("qwen3", seed)
}

/// The same with a policy of another family.
pub fn demo_inputs_of(model_type: &str, seed: u64) -> DemoInputs {
    let _one = locked("inputs.lock");
    // A policy belongs to the tasks and to the code that made it.
    let stamp = must(
        Command::new("sh").current_dir(root()).args(["-c", "cat src/train/supervised/*.rs src/model/bpe/*.rs agent/prompt/* jobs/demo/tasks/*/instruction.md | cksum | cut -d' ' -f1"]),
    );
    let dir = scratch().join(format!("demo-{}-{seed}", stamp.trim()));
    let inputs = DemoInputs {
        train: dir.join("train.parquet"),
        val: dir.join("val.parquet"),
        policy: dir.join(format!("policy-{model_type}")),
    };
    if !inputs.val.exists() {
        must(
            legorl_rank()
                .args([
                    "index",
                    "build",
                    "jobs/demo/tasks",
                    "--split-ratio",
                    "0.8",
                    "--output",
                ])
                .arg(&inputs.train),
        );
    }
    if !inputs.policy.join("config.json").exists() {
        let seed = seed.to_string();
        must(
            legorl_rank()
                .args([
                    "init-policy",
                    "--model-type",
                    model_type,
                    "--seed",
                    &seed,
                    "--output",
                ])
                .arg(&inputs.policy)
                .arg("--train-files")
                .arg(&inputs.train)
                .arg("--val-files")
                .arg(&inputs.val),
        );
    }
    inputs
}

/// See [`demo_inputs`].
#[derive(Clone, Debug)]
pub struct DemoInputs {
    /// Training index.
    pub train: PathBuf,
    /// Held-out index.
    pub val: PathBuf,
    /// Starting policy.
    pub policy: PathBuf,
}

/// One experiment in a folder of its own.
pub struct Experiment {
    /// Everything that the run writes.
    pub dir: PathBuf,
    config: String,
    sets: Vec<(String, String)>,
    ranks: u32,
}

impl Experiment {
    /// A demo run with `config`; an earlier one of the same name is deleted.
    pub fn new(name: &str, config: &str, inputs: &DemoInputs) -> Self {
        let dir = scratch().join("runs").join(name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        let mut this = Self {
            dir: dir.clone(),
            config: config.into(),
            sets: Vec::new(),
            ranks: 1,
        };
        for (key, path) in [
            ("MODEL_PATH", &inputs.policy),
            ("TRAIN_FILES", &inputs.train),
            ("VAL_FILES", &inputs.val),
        ] {
            this.set(key, path.display());
        }
        this.set("EXP_NAME", "test");
        for (key, folder) in [
            ("RUN_DIR", "run"),
            ("CKPTS_DIR", "checkpoints"),
            ("LOG_DIR", "logs"),
            ("HARBOR_TRIALS_DIR", "trials"),
        ] {
            this.set(key, dir.join(folder).display());
        }
        this
    }

    /// Overrides a variable.
    pub fn set(&mut self, key: &str, value: impl ToString) -> &mut Self {
        self.sets.retain(|(k, _)| k != key);
        self.sets.push((key.into(), value.to_string()));
        self
    }

    /// Runs under mpirun with this many ranks.
    pub fn ranks(&mut self, ranks: u32) -> &mut Self {
        self.ranks = ranks;
        self
    }

    /// Arguments after the program's name.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![self.config.clone()];
        for (key, value) in &self.sets {
            arguments.extend(["--set".into(), format!("{key}={value}")]);
        }
        arguments
    }

    /// The command line.
    pub fn command(&self) -> Command {
        let mut command = if self.ranks > 1 {
            let mut mpirun = Command::new("mpirun");
            // SAFETY: geteuid has no preconditions.
            if unsafe { libc::geteuid() } == 0 {
                mpirun.arg("--allow-run-as-root");
            }
            mpirun.args([
                "--oversubscribe",
                "--bind-to",
                "none",
                "-n",
                &self.ranks.to_string(),
            ]);
            mpirun
                .arg(bin_dir().join("legorl-rank"))
                .current_dir(root())
                .env("NO_COLOR", "1");
            mpirun
        } else {
            legorl_rank()
        };
        command.args(self.arguments());
        command
    }

    /// Starts it with its output in `output.log`.
    pub fn start(&self) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("output.log"))
            .unwrap();
        self.command()
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    /// Runs it to its end, which must be a success within `limit`.
    pub fn finish(&self, limit: Duration) {
        let mut child = self.start();
        let status = wait(&mut child, limit);
        assert!(
            status.is_some_and(|s| s.success()),
            "the run ended with {status:?}:\n{}",
            self.tail()
        );
    }

    /// The end of its output.
    pub fn tail(&self) -> String {
        let mut text = String::new();
        if let Ok(mut file) = File::open(self.dir.join("output.log")) {
            let _ = file.read_to_string(&mut text);
        }
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// The metrics by step, from the JSON lines.
    pub fn metrics(&self) -> BTreeMap<u64, BTreeMap<String, f64>> {
        let path = self.dir.join("logs/test.jsonl");
        let text =
            fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}\n{}", path.display(), self.tail()));
        let mut steps: BTreeMap<u64, BTreeMap<String, f64>> = BTreeMap::new();
        for line in text.lines() {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            let step = row["step"].as_u64().unwrap();
            let row = row
                .as_object()
                .unwrap()
                .iter()
                .filter_map(|(k, v)| Some((k.clone(), v.as_f64()?)));
            steps.entry(step).or_default().extend(row);
        }
        steps
    }
}

/// Waits for a child; kills it and returns nothing when `limit` passes.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Processes below `pid`, itself included.
pub fn process_tree(pid: u32) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let after = stat.rsplit(") ").next().unwrap();
        let parent = after.split(' ').nth(1).unwrap().parse::<u32>().unwrap();
        parents.push((child, parent));
    }
    let mut tree = vec![pid];
    let mut next = 0;
    while next < tree.len() {
        let parent = tree[next];
        tree.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(c, _)| *c));
        next += 1;
    }
    tree
}
