//! The program as a user runs it: exit codes, what it prints, what it links.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_legorl-rank");

const SOUND: &str = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
                     NGPUS_PER_NODE=1\n";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("front/ lies in the repository")
        .to_path_buf()
}

fn command(arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("PATH", std::env::var("PATH").unwrap_or_default());
    command
}

fn run(arguments: &[&str], folder: &Path) -> Output {
    command(arguments, folder)
        .output()
        .expect("the program can be started")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("the program ends by itself")
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder_with(config: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.env"), config).unwrap();
    folder
}

/// Names of the shared libraries that the ELF file asks for (its DT_NEEDED entries).
fn needed_libraries(path: &Path) -> Vec<String> {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file");
    let number = |at: usize, size: usize| {
        let mut value = [0; 8];
        value[..size].copy_from_slice(&bytes[at..at + size]);
        u64::from_le_bytes(value) as usize
    };
    let (headers, entry_size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    let segment = |i: usize| headers + i * entry_size;
    let file_offset = |address: usize| {
        (0..count)
            .map(segment)
            .find(|at| {
                number(*at, 4) == 1
                    && (number(at + 16, 8)..number(at + 16, 8) + number(at + 32, 8)).contains(&address)
            })
            .map(|at| address - number(at + 16, 8) + number(at + 8, 8))
            .expect("every address of the dynamic section lies in a loaded segment")
    };
    let dynamic = (0..count)
        .map(segment)
        .find(|at| number(*at, 4) == 2)
        .expect("a dynamic section");
    let start = number(dynamic + 8, 8);
    let entries: Vec<(usize, usize)> = (0..number(dynamic + 32, 8) / 16)
        .map(|i| (number(start + i * 16, 8), number(start + i * 16 + 8, 8)))
        .collect();
    let strings = entries
        .iter()
        .find(|(tag, _)| *tag == 5)
        .map(|(_, at)| file_offset(*at))
        .expect("a string table");
    let needed = entries.iter().filter(|(tag, _)| *tag == 1);
    needed
        .map(|(_, at)| {
            let text = &bytes[strings + at..];
            let end = text.iter().position(|b| *b == 0).expect("strings end");
            String::from_utf8_lossy(&text[..end]).into_owned()
        })
        .collect()
}

#[test]
fn the_program_links_neither_libtorch_nor_mpi() {
    let needed = needed_libraries(Path::new(PROGRAM));
    assert!(
        needed.iter().any(|name| name.starts_with("libc.so")),
        "the list was read: {needed:?}"
    );
    for name in &needed {
        let heavy = ["torch", "c10", "mpi", "stdc++"]
            .iter()
            .any(|part| name.contains(part));
        assert!(!heavy, "{PROGRAM} loads {name} before main");
    }
}

#[test]
fn the_demo_configurations_hold_together() {
    for config in ["configs/demo.env", "configs/demo_async.env"] {
        let output = run(&["--structure-only", config], &repository());
        let text = out(&output);
        assert_eq!(code(&output), 0, "{text}{}", err(&output));
        for part in [
            "run configuration (train)",
            "  experiment   project=demo",
            "✓ OK     topology",
            "⊘ SKIP   MODEL_PATH",
        ] {
            assert!(text.contains(part), "`{part}` is missing in {text}");
        }
        assert!(text.trim_end().ends_with("nothing was launched."));
        assert!(!text.contains('\u{1b}'), "no colour into a pipe");
    }
}

#[test]
fn a_wrong_configuration_is_refused_with_its_rule() {
    let folder = folder_with(&format!("{SOUND}TRAIN_BSZ=8\nTRAIN_MINI_BSZ=3\n"));
    let output = run(&["--structure-only", "run.env"], folder.path());
    assert_eq!(code(&output), 1);
    assert!(out(&output).contains("✗ FATAL  TRAIN_BSZ=8 is not a multiple of TRAIN_MINI_BSZ=3 [batch]"));
    let explained = run(&["explain", "batch"], folder.path());
    assert_eq!(code(&explained), 0);
    assert!(out(&explained).contains("fix       Choose TRAIN_MINI_BSZ"));
    let unknown = run(&["explain", "bacth"], folder.path());
    assert_eq!(code(&unknown), 1);
    assert!(err(&unknown).contains("the nearest is `batch`"));
}

#[test]
fn missing_inputs_stop_the_launch_and_not_the_structure_check() {
    let folder = folder_with(SOUND);
    assert_eq!(code(&run(&["--structure-only", "run.env"], folder.path())), 0);
    for arguments in [&["--preflight-only", "run.env"][..], &["run.env"][..]] {
        let output = run(arguments, folder.path());
        assert_eq!(code(&output), 1);
        let text = out(&output);
        assert!(text.contains("✗ FATAL  MODEL_PATH="), "{text}");
        assert!(text.contains("✗ FATAL  TRAIN_FILES: "), "{text}");
    }
}

#[test]
fn usage_and_file_errors_have_their_codes() {
    let folder = folder_with(SOUND);
    for (arguments, expected, part) in [
        (&[][..], 2, "Usage"),
        (&["--structure-only"][..], 2, "CONFIG"),
        (&["run.env", "--no-such-flag"][..], 2, "--no-such-flag"),
        (
            &["--structure-only", "--dry-run", "run.env"][..],
            2,
            "cannot be used with",
        ),
        (&["nope.env"][..], 1, "config not found"),
        (&["--set", "N_RESP=x", "run.env"][..], 1, "--set N_RESP"),
        (&["--version"][..], 0, "legorl-rank"),
    ] {
        let output = run(arguments, folder.path());
        let text = format!("{}{}", out(&output), err(&output));
        assert_eq!(code(&output), expected, "{arguments:?}: {text}");
        assert!(text.contains(part), "{arguments:?}: {text}");
    }
}

#[test]
fn unknown_names_are_a_warning_and_under_strict_an_error() {
    let folder = folder_with(&format!("{SOUND}TRAIN_BZS=8\n"));
    let output = run(&["--structure-only", "run.env"], folder.path());
    assert_eq!(code(&output), 0);
    assert!(out(&output).contains("run.env:7:1: unknown variable TRAIN_BZS; did you mean TRAIN_BSZ?"));
    let output = run(&["--structure-only", "--strict", "run.env"], folder.path());
    assert_eq!(code(&output), 1);
    assert!(out(&output).contains("[FATAL] run.env:7:1"));
}

#[test]
fn only_rank_0_prints() {
    let folder = folder_with(SOUND);
    let on_rank = |rank: &str, config: &str| {
        command(&["--structure-only", config], folder.path())
            .env("SLURM_PROCID", rank)
            .env("SLURM_STEP_NUM_TASKS", "2")
            .output()
            .unwrap()
    };
    assert!(out(&on_rank("0", "run.env")).contains("run configuration"));
    let quiet = on_rank("1", "run.env");
    assert_eq!(
        (code(&quiet), out(&quiet), err(&quiet)),
        (0, String::new(), String::new())
    );
    let missing = on_rank("1", "nope.env");
    assert_eq!(code(&missing), 1);
    assert!(
        err(&missing).starts_with("[rank 1] [FATAL] config not found"),
        "a node without the file says so"
    );
}

#[test]
fn config_show_prints_origins_and_hides_secrets() {
    let folder = folder_with(&format!("{SOUND}WANDB_API_KEY=very-secret\n"));
    let output = run(&["config", "show", "run.env", "--set", "SEED=9"], folder.path());
    assert_eq!(code(&output), 0);
    let text = out(&output);
    let line = |name: &str| {
        text.lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_default()
            .to_owned()
    };
    assert!(
        line("SEED ").contains("9") && line("SEED ").ends_with("--set SEED"),
        "{text}"
    );
    assert!(line("EXP_NAME ").ends_with("run.env:2:1"));
    assert!(line("WANDB_API_KEY ").contains("<redacted>") && !text.contains("very-secret"));
    let json = run(&["config", "show", "--json", "run.env"], folder.path());
    assert!(out(&json).contains("\"EXP_NAME\": {"));
}

#[test]
fn without_its_neighbour_a_tensor_command_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("legorl-rank");
    fs::copy(PROGRAM, &alone).unwrap();
    let output = Command::new(&alone)
        .args(["init-policy", "--output", "x", "--train-files", "t.parquet"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(code(&output), 1);
    assert!(
        err(&output).contains("legorl-rank-torch is missing"),
        "{}",
        err(&output)
    );
}

#[test]
fn task_and_index_commands_work_on_folders() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(&["task", "check", "no-such-folder"], folder.path());
    assert_eq!(code(&output), 1);
    assert!(err(&output).contains("no-such-folder"), "{}", err(&output));
    let output = run(
        &[
            "index",
            "build",
            ".",
            "--output",
            "t.parquet",
            "--split-ratio",
            "1.5",
        ],
        folder.path(),
    );
    assert_eq!(code(&output), 2, "a ratio is between 0 and 1");
}
