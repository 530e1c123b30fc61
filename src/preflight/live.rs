//! Who else is on this machine: what `legorl-rank check` shows beside the rules. Nothing is changed, and
//! nobody is judged: a row is a fact, and whether it stands in the way of this run.

use super::{
    facts::{
        folders::{holder, space},
        program::{ask, Refusal, DEADLINE},
    },
    Facts,
};
use crate::{config::Settings, plan::memory::size};
use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    time::Duration,
};

/// What a fact means for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Free.
    Free,
    /// Worth knowing.
    Note,
    /// In the way of this run.
    Taken,
}

impl State {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            State::Free => "free",
            State::Note => "note",
            State::Taken => "TAKEN",
        }
    }
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What it is about.
    pub what: String,
    /// What it means for the run.
    pub state: State,
    /// The fact.
    pub detail: String,
}

fn row(what: impl Into<String>, state: State, detail: impl Into<String>) -> Row {
    Row {
        what: what.into(),
        state,
        detail: detail.into(),
    }
}

/// Everything, in the order in which it is printed.
pub fn probe(s: &Settings, facts: &Facts) -> Vec<Row> {
    let mut rows = steps();
    rows.extend(runs(s));
    rows.extend(gpus(facts));
    rows.extend(ports(s, facts));
    rows.extend(shared_memory(facts));
    rows.extend(disks(s));
    rows.extend(libraries(facts));
    rows
}

/// Steps of this user in Slurm whose name is ours.
fn steps() -> Vec<Row> {
    let arguments = ["--noheader", "--me", "--steps", "--format=%i|%j|%M|%N"];
    match ask("squeue", &arguments, DEADLINE) {
        Err(Refusal::Missing) => vec![row("slurm", State::Note, "Slurm is not installed here")],
        Err(refused) => vec![row("slurm", State::Note, last_line(&refused))],
        Ok(text) => parse_steps(&text),
    }
}

/// Programs that fail tell the cause last.
fn last_line(refused: &Refusal) -> String {
    refused.to_string().lines().last().unwrap_or_default().to_owned()
}

fn parse_steps(text: &str) -> Vec<Row> {
    let own: Vec<Row> = text
        .lines()
        .map(|line| line.split('|').collect::<Vec<_>>())
        .filter(|fields| fields.len() == 4 && fields[1].contains("legorl"))
        .map(|f| {
            let detail = format!("step {} ({}) runs for {} on {}", f[0], f[1], f[2], f[3]);
            row("slurm", State::Note, detail)
        })
        .collect();
    if own.is_empty() {
        vec![row(
            "slurm",
            State::Free,
            "no legorl step of this user is running",
        )]
    } else {
        own
    }
}

/// Live runs beside this one: run folders of the same tree whose lock is held.
fn runs(s: &Settings) -> Vec<Row> {
    const MOST: usize = 2000;
    let Some(tree) = s.paths.run.parent().and_then(Path::parent) else {
        return Vec::new();
    };
    let folders = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect()
    };
    let found: Vec<Row> = folders(tree)
        .iter()
        .flat_map(|project| folders(project))
        .take(MOST)
        .filter_map(|run| {
            let holder = holder(&run.join("run.lock"))?;
            let state = if run == s.paths.run {
                State::Taken
            } else {
                State::Note
            };
            Some(row(
                "run",
                state,
                format!("{} is held by {holder}", run.display()),
            ))
        })
        .collect();
    if found.is_empty() {
        vec![row(
            "run",
            State::Free,
            format!("no live run below {}", tree.display()),
        )]
    } else {
        found
    }
}

fn gpus(facts: &Facts) -> Vec<Row> {
    if facts.gpus.is_empty() {
        return vec![row("gpu", State::Note, "no NVIDIA GPU is visible here")];
    }
    let mut rows = Vec::new();
    for gpu in &facts.gpus {
        let what = format!("gpu {}", gpu.index);
        let used = format!(
            "{}: {} of {} in use",
            gpu.name,
            size(gpu.used_bytes),
            size(gpu.memory_bytes)
        );
        // A driver keeps some memory for itself.
        let idle = gpu.processes.is_empty() && gpu.used_bytes < gpu.memory_bytes / 20;
        rows.push(row(&what, if idle { State::Free } else { State::Taken }, used));
        rows.extend(gpu.processes.iter().map(|process| {
            let owner = process
                .owner
                .as_deref()
                .unwrap_or("somebody outside of this container");
            row(
                &what,
                State::Taken,
                format!(
                    "process {} of {owner} ({}) holds {}",
                    process.pid,
                    process.name,
                    size(process.used_bytes)
                ),
            )
        }));
    }
    rows
}

fn ports(s: &Settings, facts: &Facts) -> Vec<Row> {
    let port = s.proxy.port;
    match &facts.proxy_port {
        None => vec![row("port", State::Free, "the proxy takes any free port")],
        Some(Ok(())) => vec![row("port", State::Free, format!("PROXY_PORT={port}"))],
        Some(Err(problem)) => {
            let wait = Duration::from_millis(500);
            let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
            let answers = TcpStream::connect_timeout(&address, wait).is_ok();
            let who = if answers { "; somebody answers there" } else { "" };
            vec![row("port", State::Taken, format!("{problem}{who}"))]
        }
    }
}

fn shared_memory(facts: &Facts) -> Vec<Row> {
    match facts.shared_memory {
        None => vec![row("/dev/shm", State::Note, "not mounted")],
        Some(shm) => {
            let state = if shm.free < shm.total / 2 {
                State::Note
            } else {
                State::Free
            };
            vec![row(
                "/dev/shm",
                state,
                format!("{} of {} free", size(shm.free), size(shm.total)),
            )]
        }
    }
}

fn disks(s: &Settings) -> Vec<Row> {
    let folders = [
        ("RUN_DIR", &s.paths.run),
        ("CKPTS_DIR", &s.paths.checkpoints),
        ("LOG_DIR", &s.paths.logs),
        ("HARBOR_TRIALS_DIR", &s.paths.trials),
    ];
    folders
        .into_iter()
        .map(|(variable, path)| {
            let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
            match space(existing) {
                None => row("disk", State::Note, format!("{variable}: space unknown")),
                Some(space) => {
                    let full = space.free < space.total / 20;
                    let detail = format!("{variable}: {} of {} free", size(space.free), size(space.total));
                    row("disk", if full { State::Note } else { State::Free }, detail)
                }
            }
        })
        .collect()
}

/// Shared libraries that a GPU run loads, as the loader would find them, and programs.
fn libraries(facts: &Facts) -> Vec<Row> {
    let cache = ask("ldconfig", &["-p"], DEADLINE)
        .or_else(|_| ask("/sbin/ldconfig", &["-p"], DEADLINE))
        .unwrap_or_default();
    let mut rows: Vec<Row> = ["libcuda.so.1", "libnccl.so.2", "libcudnn.so.9", "libmpi.so.40"]
        .into_iter()
        .map(|name| match library(&cache, name) {
            Some(path) => row("library", State::Note, path),
            None => row(
                "library",
                State::Note,
                format!("{name}: not on the loader's path"),
            ),
        })
        .collect();
    let tensors = std::env::current_exe()
        .ok()
        .and_then(|own| own.parent().map(|dir| dir.join("legorl-rank-torch")));
    rows.push(match tensors.filter(|path| path.is_file()) {
        Some(path) => row("program", State::Note, path.display().to_string()),
        None => row(
            "program",
            State::Taken,
            "legorl-rank-torch is not beside this program: runs cannot start",
        ),
    });
    let versions: [(&str, &[&str]); 3] = [
        ("bwrap", &["--version"]),
        ("mpirun", &["--version"]),
        ("srun", &["--version"]),
    ];
    for (program, arguments) in versions {
        let detail = match ask(program, arguments, DEADLINE) {
            Ok(text) => format!("{program}: {}", text.lines().next().unwrap_or("")),
            Err(refused) => format!("{program}: {}", last_line(&refused)),
        };
        rows.push(row("program", State::Note, detail));
    }
    if let Some(gpu) = facts.gpus.first() {
        rows.push(row("driver", State::Note, format!("NVIDIA {}", gpu.driver)));
    }
    rows
}

/// The file that `name` stands for in the output of `ldconfig -p`; its name usually holds the version.
fn library(cache: &str, name: &str) -> Option<String> {
    let line = cache.lines().find(|line| line.trim_start().starts_with(name))?;
    let link = line.split_once("=> ")?.1.trim();
    let file = fs::canonicalize(link).unwrap_or_else(|_| PathBuf::from(link));
    Some(file.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        facts::{GpuFacts, GpuProcess},
        rules::testing::{facts, settings},
    };

    #[test]
    fn steps_of_ours_are_named_and_others_left_out() {
        let text = "12.0|legorl-rank|1:02|node1\n13.0|bash|0:01|node2\n12.extern|extern|1:02|node1";
        let rows = parse_steps(text);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].detail, "step 12.0 (legorl-rank) runs for 1:02 on node1");
        assert_eq!(parse_steps("")[0].state, State::Free);
    }

    #[test]
    fn a_process_on_a_gpu_is_named_with_its_owner() {
        let mut busy = facts();
        busy.gpus = vec![GpuFacts {
            index: 3,
            name: "NVIDIA H200".into(),
            driver: "580".into(),
            memory_bytes: 140 << 30,
            used_bytes: 90 << 30,
            processes: vec![GpuProcess {
                pid: 4711,
                owner: Some("ann".into()),
                name: "python3".into(),
                used_bytes: 90 << 30,
            }],
        }];
        let rows = gpus(&busy);
        assert!(rows.iter().all(|row| row.state == State::Taken));
        assert_eq!(rows[1].detail, "process 4711 of ann (python3) holds 90 GiB");
    }

    #[test]
    fn a_live_run_is_seen_by_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("runs/p/e");
        let s = settings(&[&format!("RUN_DIR={}", run.display())]);
        assert_eq!(runs(&s)[0].state, State::Free);
        let _other = crate::rank::run_lock::RunLock::of_file(&dir.path().join("runs/p/x/run.lock")).unwrap();
        assert_eq!(runs(&s)[0].state, State::Note, "another experiment");
        let _own = crate::rank::run_lock::RunLock::of_file(&run.join("run.lock")).unwrap();
        assert!(runs(&s).iter().any(|row| row.state == State::Taken));
    }

    #[test]
    fn a_library_is_found_as_the_loader_finds_it() {
        let cache = "\tlibnccl.so.2 (libc6,x86-64) => /nonexistent/libnccl.so.2\n";
        assert_eq!(
            library(cache, "libnccl.so.2").as_deref(),
            Some("/nonexistent/libnccl.so.2")
        );
        assert_eq!(library(cache, "libmpi.so.40"), None);
    }
}
