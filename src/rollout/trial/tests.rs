//! Real sandboxes, the real mini agent and the real verifier; the proxy's side is scripted, since the proxy belongs
//! to another layer.

use super::*;
use crate::base::{
    BranchKind, CapturedBranch, CapturedSession, GroupId, Purpose, SessionEndpoint, SessionError,
    SessionHost, SessionId, SessionSpec, StopReason, TokenSequence, TrialKey,
};
use crate::rollout::sandbox::process::{ProcessBackend, ProcessBackendConfig};
use crate::rollout::scaffold::mini::{Mini, MiniConfig};
use crate::rollout::task::TaskSpec;
use serde_json::{json, Value};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU32, Ordering},
        Arc, Mutex,
    },
};
use tokio::sync::watch;

/// Answers the agent's model calls with fixed shell commands, then with a last word.
struct Sessions {
    socket: PathBuf,
    turns: Arc<AtomicU32>,
    /// What `close` adds to the turns that were answered.
    capture: CapturedSession,
    open: Mutex<Vec<SessionSpec>>,
    closed: Mutex<Vec<SessionId>>,
}

impl Sessions {
    /// `commands: None` refuses every call.
    fn start(dir: &Path, commands: Option<Vec<&'static str>>, capture: CapturedSession) -> Arc<Self> {
        let socket = dir.join("proxy.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let turns = Arc::new(AtomicU32::new(0));
        let answered = Arc::clone(&turns);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that goes away is not the server's failure.
                let _ = answer(&mut stream.unwrap(), commands.as_deref(), &answered);
            }
        });
        Arc::new(Self {
            socket,
            turns,
            capture,
            open: Mutex::default(),
            closed: Mutex::default(),
        })
    }
}

fn answer(stream: &mut UnixStream, commands: Option<&[&str]>, turns: &AtomicU32) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut length, mut line) = (0, String::new());
    while reader.read_line(&mut line)? > 2 {
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    reader.read_exact(&mut vec![0; length])?;
    let (status, body) = match commands {
        None => (
            "400 Bad Request",
            json!({"error": {"message": "refused by script"}}),
        ),
        Some(commands) => {
            let turn = turns.fetch_add(1, Ordering::SeqCst) as usize;
            let message = match commands.get(turn) {
                Some(command) => json!({"role": "assistant", "content": null, "tool_calls": [{
                    "id": format!("call_{turn}"), "type": "function",
                    "function": {"name": "bash", "arguments": json!({"command": command}).to_string()},
                }]}),
                None => json!({"role": "assistant", "content": "done"}),
            };
            (
                "200 OK",
                json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}),
            )
        }
    };
    let body = body.to_string();
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[async_trait::async_trait]
impl SessionHost for Sessions {
    fn open(&self, spec: SessionSpec) -> Result<SessionEndpoint, SessionError> {
        let session = SessionId::from(spec.name.as_str());
        self.open.lock().unwrap().push(spec);
        Ok(SessionEndpoint {
            path: format!("/sess/{session}.secret"),
            session,
            secret: "secret".to_owned(),
            model: "policy".to_owned(),
            tcp: None,
            unix_socket: self.socket.clone(),
        })
    }

    async fn close(&self, session: &SessionId) -> Result<CapturedSession, SessionError> {
        self.closed.lock().unwrap().push(session.clone());
        Ok(CapturedSession {
            turns: self.turns.load(Ordering::SeqCst),
            ..self.capture.clone()
        })
    }

    fn cancel_group(&self, _: GroupId) {}
}

struct Setup {
    folder: tempfile::TempDir,
    sessions: Arc<Sessions>,
    runner: Arc<TrialRunner>,
    task: TaskSpec,
    cancel: watch::Sender<bool>,
}

const ASSIGNMENT: TrialAssignment = TrialAssignment {
    key: TrialKey {
        purpose: Purpose::Val { step: 7 },
        group: GroupId(3),
        sample: 1,
    },
    attempt: 2,
    row: 0,
    seed: 99,
};

impl Setup {
    fn new(toml: &str, test: &str, commands: Option<Vec<&'static str>>, capture: CapturedSession) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("tasks/write-answer");
        for part in ["environment", "tests"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        fs::write(dir.join("task.toml"), toml).unwrap();
        fs::write(dir.join("instruction.md"), "Write the answer.\n").unwrap();
        fs::write(
            dir.join("environment/Dockerfile"),
            "FROM debian:12\nWORKDIR /app\nCOPY data.txt /app/\n",
        )
        .unwrap();
        fs::write(dir.join("environment/data.txt"), "42\n").unwrap();
        fs::write(dir.join("tests/test.sh"), test).unwrap();
        fs::write(dir.join("tests/expected"), "42\n").unwrap();

        let backend = ProcessBackend::new(ProcessBackendConfig {
            state_dir: folder.path().join("sandboxes"),
            rootfs: None,
            helper: None,
            owner: "test".to_owned(),
        });
        let sessions = Sessions::start(folder.path(), commands, capture);
        let purpose = PurposeConfig {
            sampling: SamplingParams::default(),
            agent_timeout_max: Duration::from_secs(60),
        };
        let config = TrialRunnerConfig {
            trials_dir: folder.path().join("trials"),
            run: "run".to_owned(),
            owner: "test".to_owned(),
            train: purpose.clone(),
            val: purpose,
            max_turns: 10,
            max_total_tokens: 4096,
            max_tokens_per_turn: 512,
            max_consecutive_no_tool: 0,
            agent_timeout_multiplier: 1.0,
            verifier_timeout_multiplier: 1.0,
            agent_setup_timeout: Duration::from_secs(30),
            override_cpus: None,
            override_memory_mb: None,
            pids_limit: None,
            room_deadline: Duration::from_secs(60),
        };
        Self {
            runner: Arc::new(
                TrialRunner::new(
                    config,
                    Arc::new(backend),
                    Arc::new(Mini::new(MiniConfig::default())),
                    Arc::clone(&sessions) as Arc<dyn SessionHost>,
                )
                .unwrap(),
            ),
            task: TaskSpec::load(&dir).unwrap(),
            sessions,
            folder,
            cancel: watch::channel(false).0,
        }
    }

    async fn run(&self) -> AttemptEnd {
        let end = self
            .runner
            .run(&ASSIGNMENT, &self.task, self.cancel.subscribe())
            .await;
        let started = self.trial_dir().join("agent/instruction.md").exists();
        self.assert_released(started).await;
        end
    }

    async fn finished(&self) -> Trajectory {
        match self.run().await {
            AttemptEnd::Finished(trajectory) => *trajectory,
            other => panic!("{other:?}"),
        }
    }

    async fn failed(&self, reason: DropReason) -> String {
        match self.run().await {
            AttemptEnd::Failed(failure) => {
                assert_eq!(failure.reason, reason, "{}", failure.detail);
                assert_eq!(failure.task, "write-answer");
                failure.detail
            }
            other => panic!("{other:?}"),
        }
    }

    /// Every session that was opened is closed once, and no sandbox is left. One that failed to start is deleted
    /// in the background.
    async fn assert_released(&self, started: bool) {
        let opened: Vec<_> = self
            .sessions
            .open
            .lock()
            .unwrap()
            .iter()
            .map(|s| s.name.clone())
            .collect();
        let closed: Vec<_> = self
            .sessions
            .closed
            .lock()
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(opened, closed);
        for name in opened {
            for _ in 0..if started { 0 } else { 1000 } {
                if !holds(&self.folder.path().join("sandboxes"), &name) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(
                !holds(&self.folder.path().join("sandboxes"), &name),
                "sandbox {name} is left"
            );
        }
    }

    fn trial_dir(&self) -> PathBuf {
        let name = self.sessions.open.lock().unwrap()[0].name.clone();
        self.folder.path().join("trials/val_step_0007").join(name)
    }

    fn read(&self, name: &str) -> String {
        let path = self.trial_dir().join(name);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }
}

/// True if an entry below `dir` has `name` in its name; what is only left to be deleted does not count.
fn holds(dir: &Path, name: &str) -> bool {
    fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| {
        let found = entry.file_name();
        found != ".trash" && (found.to_string_lossy().contains(name) || holds(&entry.path(), name))
    })
}

const COMPARE: &str = "#!/bin/bash
cat /app/seen
if cmp -s /app/answer /tests/expected; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
";

#[tokio::test(flavor = "multi_thread")]
async fn a_solved_task_is_a_trajectory_and_a_folder() {
    let sequence = TokenSequence {
        token_ids: vec![1, 2],
        loss_mask: vec![false, true],
        logprobs: vec![0.0, -0.5],
        versions: vec![0, 4],
        prompt_len: 1,
        weight: 1.0,
        routing: None,
    };
    let capture = CapturedSession {
        sequences: vec![sequence.clone()],
        prompt_tokens: 120,
        completion_tokens: 30,
        branches: vec![CapturedBranch {
            kind: BranchKind::Main,
            trainable: true,
            parent: None,
            turns: 1,
            tokens: sequence.clone(),
            messages: vec![json!({"role": "user", "content": "Write the answer."})],
        }],
        ..CapturedSession::default()
    };
    let commands = vec!["ls /tests/test.sh > /app/seen 2>&1", "cat data.txt > answer"];
    let setup = Setup::new(
        "[task]\nname = \"demo/write-answer\"\n",
        COMPARE,
        Some(commands),
        capture,
    );
    let trajectory = setup.finished().await;

    assert_eq!(trajectory.key, ASSIGNMENT.key);
    assert_eq!(trajectory.attempt, 2);
    assert_eq!(trajectory.task, "demo/write-answer");
    assert_eq!(trajectory.outcome.reward, 1.0);
    assert_eq!(
        trajectory.outcome.rewards,
        BTreeMap::from([("reward".to_owned(), 1.0)])
    );
    assert_eq!(trajectory.outcome.stop, StopReason::AgentCompleted);
    assert_eq!(trajectory.sequences, [sequence]);
    assert_eq!(trajectory.turns, 3);
    assert!(trajectory.session.starts_with("write-answer__"));
    let spec = &setup.sessions.open.lock().unwrap()[0].clone();
    assert_eq!((spec.sampling.seed, spec.limits.max_turns), (99, 10));

    assert_eq!(setup.read("verifier/reward.txt"), "1\n");
    assert!(
        setup.read("verifier/test-stdout.txt").contains("No such file"),
        "tests came after the agent"
    );
    let result = setup.json("result.json");
    assert_eq!(result["task_name"], "demo/write-answer");
    assert_eq!(result["verifier_result"]["rewards"]["reward"], 1.0);
    assert_eq!(result["agent_result"]["n_output_tokens"], 30);
    assert_eq!(
        result["agent_result"]["metadata"]["stop_reason"],
        "agent_completed"
    );
    assert!(result.get("exception_info").is_none());
    let branch = &setup.json("proxy_trajectory.json")["branches"][0];
    assert_eq!(
        (
            &branch["kind"],
            &branch["tokens"],
            &branch["messages"][0]["content"]
        ),
        (&json!("main"), &json!(2), &json!("Write the answer."))
    );
    let left: Vec<_> = fs::read_dir(setup.trial_dir())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    harbor_reads(&setup.trial_dir().join("result.json"));
}

/// `harbor` reads the result; `LEGORL_HARBOR_PYTHON` names a Python that can import it.
fn harbor_reads(result: &Path) {
    let Some(python) = std::env::var_os("LEGORL_HARBOR_PYTHON") else {
        eprintln!("skipped: LEGORL_HARBOR_PYTHON names no Python with harbor");
        return;
    };
    let script = "
import sys
from harbor.models.trial.result import TrialResult
result = TrialResult.model_validate_json(open(sys.argv[1]).read())
assert result.reward_valid and result.verifier_result.rewards == {'reward': 1.0}
assert result.agent_execution.finished_at >= result.agent_execution.started_at
assert result.compute_token_cost_totals()[2] == 30
";
    let output = std::process::Command::new(python)
        .args(["-c", script])
        .arg(result)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_answer_is_judged_zero() {
    let commands = vec!["echo 41 > answer"];
    let setup = Setup::new("", COMPARE, Some(commands), CapturedSession::default());
    let trajectory = setup.finished().await;
    assert_eq!(trajectory.outcome.reward, 0.0);
    assert_eq!(trajectory.outcome.stop, StopReason::AgentCompleted);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_out_of_time_is_still_judged() {
    let setup = Setup::new(
        "[agent]\ntimeout_sec = 1.5\n",
        "echo 0.5 > /logs/verifier/reward.txt\n",
        Some(vec!["sleep 600"]),
        CapturedSession::default(),
    );
    let trajectory = setup.finished().await;
    assert_eq!(trajectory.outcome.stop, StopReason::Timeout);
    assert_eq!(trajectory.outcome.reward, 0.5);
}

#[tokio::test(flavor = "multi_thread")]
async fn rewards_of_the_agent_do_not_count() {
    let commands = vec![
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; \
         echo '{\"reward\": 1}' > /logs/verifier/reward.json; \
         printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/helper.sh",
    ];
    // Runs a helper that the task does not have: what the agent left must be gone.
    let test = "sh /tests/helper.sh; echo checked\n";
    let setup = Setup::new("", test, Some(commands), CapturedSession::default());
    let detail = setup.failed(DropReason::VerifierFailed).await;
    assert!(
        detail.contains("tests/test.sh") && detail.contains("neither"),
        "{detail}"
    );
    assert!(
        detail.contains("checked"),
        "the end of the output is shown: {detail}"
    );
    assert!(setup.read("exception.txt").starts_with("verifier_failed: "));
    assert_eq!(
        setup.json("result.json")["exception_info"]["exception_type"],
        "verifier_failed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_verdicts_show_what_was_found() {
    for (test, reason, words) in [
        (
            "echo nan > /logs/verifier/reward.txt",
            DropReason::VerifierFailed,
            "`nan` is not finite",
        ),
        (
            "echo 1 > /logs/verifier/reward.txt; echo '{\"a\": \"x\"}' > /logs/verifier/reward.json",
            DropReason::VerifierFailed,
            "a: \"x\"",
        ),
        (
            "mkdir /logs/verifier/reward.txt",
            DropReason::VerifierFailed,
            "not a regular file",
        ),
        (
            "yes 1 | head -c 100000 > /logs/verifier/reward.txt",
            DropReason::VerifierFailed,
            "longer than 32 KiB",
        ),
        ("sleep 600", DropReason::VerifierTimeout, "within 2 s"),
        ("exit 3", DropReason::VerifierFailed, "exit code 3"),
    ] {
        let toml = if reason == DropReason::VerifierTimeout {
            "[verifier]\ntimeout_sec = 2\n"
        } else {
            ""
        };
        let setup = Setup::new(toml, test, Some(vec![]), CapturedSession::default());
        let detail = setup.failed(reason).await;
        assert!(detail.contains(words), "{test}: {detail}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verifier_variables_come_from_the_host() {
    let toml = "[verifier]\nenv = { WANTED = \"${PATH}\", FALLBACK = \"${LEGORL_NOT_SET:-7}\" }\n";
    let test = "[ -n \"$WANTED\" ] && echo \"$FALLBACK\" > /logs/verifier/reward.txt\n";
    let setup = Setup::new(toml, test, Some(vec![]), CapturedSession::default());
    assert_eq!(setup.finished().await.outcome.reward, 7.0);

    let toml = "[verifier]\nenv = { WANTED = \"${LEGORL_NOT_SET}\" }\n";
    let setup = Setup::new(toml, test, Some(vec![]), CapturedSession::default());
    let detail = setup.failed(DropReason::VerifierFailed).await;
    assert!(
        detail.contains("task.toml") && detail.contains("LEGORL_NOT_SET"),
        "{detail}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_the_infrastructure_are_no_rewards() {
    let engine = CapturedSession {
        engine_failure: Some("replica 0 is lost".to_owned()),
        ..CapturedSession::default()
    };
    let setup = Setup::new("", COMPARE, Some(vec!["cp data.txt answer"]), engine);
    let detail = setup.failed(DropReason::EngineFailed).await;
    assert!(detail.contains("replica 0 is lost"), "{detail}");

    let setup = Setup::new("", COMPARE, None, CapturedSession::default());
    let detail = setup.failed(DropReason::AgentSetupFailed).await;
    assert!(detail.contains("before any model call was answered"), "{detail}");

    let setup = Setup::new("", COMPARE, Some(vec![]), CapturedSession::default());
    let dockerfile = setup.task.environment_dir().join("Dockerfile");
    fs::write(&dockerfile, "FROM debian:12\nRUN false\n").unwrap();
    let detail = setup.failed(DropReason::EnvSetupFailed).await;
    assert!(detail.contains("environment/Dockerfile:2"), "{detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_attempt_leaves_nothing() {
    let setup = Setup::new("", COMPARE, Some(vec!["sleep 600"]), CapturedSession::default());
    let cancel = async {
        while setup.sessions.turns.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        setup.cancel.send_replace(true);
    };
    let (end, ()) = tokio::join!(setup.run(), cancel);
    assert_eq!(end, AttemptEnd::Unwanted);
    assert!(setup.trial_dir().join("result.json").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_attempt_closes_its_session() {
    let setup = Setup::new("", COMPARE, Some(vec!["sleep 600"]), CapturedSession::default());
    let (runner, task, cancel) = (
        Arc::clone(&setup.runner),
        setup.task.clone(),
        setup.cancel.subscribe(),
    );
    let attempt = tokio::spawn(async move { runner.run(&ASSIGNMENT, &task, cancel).await });
    while setup.sessions.turns.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    attempt.abort();
    assert!(attempt.await.unwrap_err().is_cancelled());
    for _ in 0..1000 {
        if !setup.sessions.closed.lock().unwrap().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(setup.sessions.closed.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_mebibytes_of_tool_output_end_no_trial() {
    let flood = "head -c 52428800 /dev/zero | tr '\\0' x; cat data.txt > answer";
    let setup = Setup::new("", COMPARE, Some(vec![flood]), CapturedSession::default());
    let trajectory = setup.finished().await;
    assert_eq!(trajectory.outcome.reward, 1.0);
    assert_eq!(trajectory.outcome.stop, StopReason::AgentCompleted);
    let logs = fs::read_dir(setup.trial_dir().join("agent")).unwrap();
    let size: u64 = logs.map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 20 << 20, "the agent's logs are cut: {size} bytes");
}

/// A small file system of its own; unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, options: &str) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at);
        mount
            .output()
            .is_ok_and(|o| o.status.success())
            .then(|| Self(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_delays_a_trial_and_does_not_drop_it() {
    let commands = Some(vec!["cat data.txt > answer"]);
    let setup = Setup::new("", COMPARE, commands, CapturedSession::default());
    let trials = setup.folder.path().join("trials");
    let Some(_disk) = SmallDisk::mount(&trials, "nr_inodes=64") else {
        eprintln!("SKIP full disk: mounting a small file system needs root");
        return;
    };
    let fill = |n: usize| trials.join(format!("fill-{n}"));
    let filled = (0..100).take_while(|n| fs::write(fill(*n), "").is_ok()).count();
    assert!(filled < 100, "the disk must be full");
    let make_room = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(setup.sessions.open.lock().unwrap().is_empty(), "it waits");
        (0..filled).for_each(|n| fs::remove_file(fill(n)).unwrap());
    };
    let (trajectory, ()) = tokio::join!(setup.finished(), make_room);
    assert_eq!(trajectory.outcome.reward, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_before_the_trajectory_is_written_loses_nothing() {
    let message = json!({"role": "user", "content": "x".repeat(3 << 20)});
    let capture = CapturedSession {
        branches: vec![CapturedBranch {
            kind: BranchKind::Main,
            trainable: false,
            parent: None,
            turns: 1,
            tokens: TokenSequence::default(),
            messages: vec![message.clone()],
        }],
        ..CapturedSession::default()
    };
    let setup = Setup::new("", COMPARE, Some(vec!["cat data.txt > answer"]), capture);
    let trials = setup.folder.path().join("trials");
    let Some(_disk) = SmallDisk::mount(&trials, "size=8m") else {
        eprintln!("SKIP full disk: mounting a small file system needs root");
        return;
    };
    let ballast = trials.join("ballast");
    fs::write(&ballast, vec![1; 6 << 20]).unwrap();
    let make_room = async {
        let begin = std::time::Instant::now();
        while setup.sessions.closed.lock().unwrap().is_empty() {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "the trial never closed its session"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!setup.trial_dir().join("result.json").exists(), "it waits");
        fs::remove_file(&ballast).unwrap();
    };
    let (trajectory, ()) = tokio::join!(setup.finished(), make_room);
    assert_eq!(trajectory.outcome.reward, 1.0);
    assert_eq!(
        setup.json("proxy_trajectory.json")["branches"][0]["messages"][0],
        message
    );
    assert_eq!(setup.json("result.json")["reward_valid"], true);
}
