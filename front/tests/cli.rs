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
        (&["--set", "NOVALUE", "run.env"][..], 2, "--set NAME=VALUE"),
        (&["trian", "run.env"][..], 2, "train"),
        (&["run.env", "more.env"][..], 2, "more.env"),
        (&["--structure-only", "run.evn"][..], 1, "did you mean run.env?"),
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
    // A check is one answer, wherever it is asked.
    let wrong = "PROJECT_NAME=p\nN_RESP=zero\n";
    fs::write(folder.path().join("wrong.env"), wrong).unwrap();
    for config in ["nope.env", "wrong.env"] {
        let (first, second) = (on_rank("0", config), on_rank("1", config));
        assert_eq!((code(&first), code(&second)), (1, 1));
        assert!(err(&first).starts_with("[FATAL] "), "{}", err(&first));
        assert_eq!(out(&second) + &err(&second), "");
    }
    // A launch that fails because one node lacks the file is explained by that node.
    let launch = command(&["nope.env"], folder.path())
        .env("SLURM_PROCID", "1")
        .output()
        .unwrap();
    assert_eq!(code(&launch), 1);
    assert!(err(&launch).starts_with("[rank 1] [FATAL] config not found"));
    // Every launcher's variables are understood.
    for rank in ["PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
        let output = command(&["--structure-only", "run.env"], folder.path())
            .env(rank, "3")
            .output()
            .unwrap();
        assert_eq!((code(&output), out(&output)), (0, String::new()), "{rank}");
    }
}

/// Ranks besides the first look at the machine too, so that a step of checks ends with one code.
#[test]
fn every_rank_ends_a_check_with_the_code_of_the_first() {
    let folder = folder_with(SOUND);
    for mode in ["--preflight-only", "--dry-run"] {
        let codes = ["0", "1"].map(|rank| {
            let output = command(&[mode, "run.env"], folder.path())
                .env("SLURM_PROCID", rank)
                .output()
                .unwrap();
            assert_eq!(out(&output).is_empty(), rank == "1", "only rank 0 prints");
            code(&output)
        });
        assert_eq!(codes, [1, 1], "MODEL_PATH is missing on this machine");
    }
}

/// In a launch the first rank alone judges: without the facts that it has, this configuration looks wrong.
#[test]
fn the_other_ranks_of_a_launch_leave_the_checks_to_the_first() {
    use std::os::unix::fs::PermissionsExt;
    let config = SOUND.replace("MODEL_PATH=m", "MODEL_PATH=qwen3_5_moe") + "TOOL_CALL_PARSER=hermes\n";
    let folder = folder_with(&config);
    let alone = run(&["--structure-only", "run.env"], folder.path());
    assert!(
        out(&alone).contains("TOOL_CALL_PARSER=hermes, but"),
        "{}",
        out(&alone)
    );
    let program = folder.path().join("legorl-rank");
    fs::copy(PROGRAM, &program).unwrap();
    let stand_in = folder.path().join("legorl-rank-torch");
    fs::write(&stand_in, "#!/bin/sh\necho in its place\n").unwrap();
    fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).unwrap();
    let launch = |rank: &str| {
        Command::new(&program)
            .arg("run.env")
            .current_dir(folder.path())
            .env_clear()
            .env("PATH", std::env::var("PATH").unwrap_or_default())
            .env("OMPI_COMM_WORLD_RANK", rank)
            .env("OMPI_COMM_WORLD_SIZE", "2")
            .output()
            .unwrap()
    };
    let other = launch("1");
    assert_eq!(
        (code(&other), out(&other).as_str()),
        (0, "in its place\n"),
        "{}",
        err(&other)
    );
    // The first one refuses, and says why.
    let first = launch("0");
    assert_eq!(code(&first), 1);
    assert!(out(&first).contains("FATAL"), "{}", out(&first));
}

#[test]
fn evaluations_and_sampling_runs_are_checked_and_not_launched() {
    let folder = folder_with("PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nDATASET_NAME=d\n");
    let infer = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nINDEX_FILE=i\nRESULTS_DIR=r\nOUTPUT_INDEX=o\n";
    fs::write(folder.path().join("infer.env"), infer).unwrap();
    for (kind, config) in [("eval", "run.env"), ("infer", "infer.env")] {
        let output = run(&[kind, "--structure-only", config], folder.path());
        let text = out(&output);
        assert_eq!(code(&output), 0, "{text}{}", err(&output));
        assert!(text.contains(&format!("run configuration ({kind})")), "{text}");
        // The command may follow its flags, as under srun scripts that add them.
        let output = run(&["--structure-only", kind, config], folder.path());
        assert_eq!(code(&output), 0);
        for arguments in [&[kind, "--preflight-only", config][..], &[kind, config][..]] {
            let output = run(arguments, folder.path());
            assert_eq!(code(&output), 1, "MODEL_PATH is missing: {}", out(&output));
        }
    }
    let output = run(&["eval", "--structure-only", "infer.env"], folder.path());
    assert_eq!(code(&output), 1);
    assert!(
        err(&output).contains("DATASET_PATH has no value"),
        "{}",
        err(&output)
    );
}

/// Every row of the table of common failures, as a new user meets it.
#[test]
fn common_failures_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = |change: &dyn Fn(String) -> String| {
        let text = "BACKEND=k8s\nSCAFFOLD=ohsdk\nTRAINING_MODE=sync\nMODEL_ENGINE=veomni\nPROJECT_NAME=p\nEXP_NAME=e\n\
            MODEL_PATH=/models/Qwen3.5-35B-A3B\nTOOL_CALL_PARSER=qwen3_coder\nTRAIN_FILES=/t.parquet\nVAL_FILES=/v.parquet\n\
            K8S_KUBECONFIG=/kube\nNNODES=1\nN_NODES_TRAIN=1\nN_NODES_ROLLOUT=0\nTOTAL_EPOCHS=1\nMAX_RESP=58304\n\
            HARBOR_K8S_INLINE_BUILD=true\nTEMPLATE_MODULES=( runtime/process.env backend/${BACKEND}.env harbor/common.env\n\
            scaffold/${SCAFFOLD}.env verl/common.env verl/${TRAINING_MODE}.env verl/${MODEL_ENGINE}.env )\n";
        fs::write(folder.path().join("run.env"), change(text.to_owned())).unwrap();
        run(&["--structure-only", "run.env"], folder.path())
    };
    let sound = cluster(&|text| text);
    assert_eq!(code(&sound), 0, "{}{}", out(&sound), err(&sound));

    let output = run(&["--structure-only", "configs/run.env"], folder.path());
    assert_eq!(code(&output), 1);
    let text = err(&output);
    assert!(
        text.contains("config not found: `configs/run.env`")
            && text.contains("counts from the working directory"),
        "{text}"
    );

    let output = cluster(&|text| text.replace("/models/Qwen3.5-35B-A3B", "CHANGEME"));
    assert_eq!(code(&output), 0, "expected until it is filled in");
    assert!(
        out(&output).contains("⚠ WARN") && out(&output).contains("CHANGEME"),
        "{}",
        out(&output)
    );
    let output = cluster(&|text| text.replace("BACKEND=k8s", "BACKEND=CHANGEME"));
    assert_eq!(code(&output), 1);
    assert!(err(&output).contains("backend/k8s.env"), "{}", err(&output));

    let output = cluster(&|text| text.replace("K8S_KUBECONFIG=/kube\n", ""));
    assert_eq!(code(&output), 1);
    let text = err(&output);
    assert!(
        text.contains("K8S_KUBECONFIG: K8S_KUBECONFIG is required"),
        "{text}"
    );
    assert!(text.contains("set K8S_KUBECONFIG in the run config"), "{text}");
}

#[test]
fn colour_is_for_terminals() {
    let folder = folder_with(SOUND);
    for (name, value) in [
        ("NO_COLOR", "1"),
        ("CLICOLOR_FORCE", "1"),
        ("TERM", "xterm-256color"),
    ] {
        for arguments in [
            &["--structure-only", "run.env"][..],
            &["--help"][..],
            &["--wrong"][..],
        ] {
            let output = command(arguments, folder.path())
                .env(name, value)
                .output()
                .unwrap();
            let text = out(&output) + &err(&output);
            assert!(
                name == "CLICOLOR_FORCE" || !text.contains('\u{1b}'),
                "{name}: {text}"
            );
        }
    }
    // A terminal: script(1) gives the program one.
    let on_terminal = |no_color: Option<&str>| {
        let line = format!("{PROGRAM} --structure-only run.env");
        let mut command = Command::new("script");
        command
            .args(["-qec", &line, "/dev/null"])
            .current_dir(folder.path())
            .env_remove("NO_COLOR");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        command.output().map(|output| out(&output))
    };
    match on_terminal(None) {
        Ok(text) => {
            assert!(text.contains('\u{1b}'), "{text}");
            assert!(!on_terminal(Some("1")).unwrap().contains('\u{1b}'));
        }
        Err(error) => println!("SKIP colour on a terminal: script(1): {error}"),
    }
}

#[test]
fn a_dry_run_prints_the_launch_of_every_rank() {
    let folder = folder_with(&format!(
        "{SOUND}NNODES=2\nN_NODES_TRAIN=1\nN_NODES_ROLLOUT=1\nTRAINING_MODE=async\n"
    ));
    let output = run(&["--dry-run", "run.env"], folder.path());
    // The checkpoint is missing here, which is the verdict; the launch is shown all the same.
    assert_eq!(code(&output), 1);
    let text = out(&output);
    for part in [
        "sbatch --nodes=2 --ntasks-per-node=1 slurm/train_async.sbatch ",
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --mpi=pmix --kill-on-bad-exit=1 legorl-rank train ",
        "    0      0     0  head, trainer\n    1      1     0  engine replica\n",
        "[dry-run] this run would not start",
    ] {
        assert!(text.contains(part), "`{part}` is missing in {text}");
    }
}

#[test]
fn completion_works_in_bash() {
    let folder = folder_with(SOUND);
    let script = "eval \"$(legorl-rank completion bash)\"
        try() { COMP_LINE=$1; COMP_POINT=${#1}; COMPREPLY=(); _legorl_rank; echo \"${COMPREPLY[*]}\"; }
        try 'legorl-rank conf'
        try 'legorl-rank train run.env --set TRAIN_MINI'
        try 'legorl-rank train run.env --set BACKEND=d'
        try 'legorl-rank explain topol'";
    let path = Path::new(PROGRAM).parent().unwrap().display().to_string();
    let output = Command::new("bash")
        .args(["--norc", "-c", script])
        .current_dir(folder.path())
        .env(
            "PATH",
            format!("{path}:{}", std::env::var("PATH").unwrap_or_default()),
        )
        .output()
        .expect("bash is there");
    let text = out(&output);
    assert_eq!(
        text.lines().collect::<Vec<_>>(),
        ["config", "TRAIN_MINI_BSZ=", "docker", "topology"],
        "{}",
        err(&output)
    );
    for shell in ["zsh", "fish"] {
        assert!(out(&run(&["completion", shell], folder.path())).contains("legorl-rank complete"));
    }
}

#[test]
fn a_secret_that_is_copied_elsewhere_is_not_shown_either() {
    let secret = "hunter2hunter2";
    let line = format!("HF_TOKEN={secret}\n");
    for (copy, fails) in [
        ("RUN_DIR=a\nRUN_DIR=/tmp/${HF_TOKEN}/x\n", false),
        ("TRAIN_BSZ=${HF_TOKEN}\n", true),
        ("EXP_NAME=../${HF_TOKEN}\n", true),
        ("A=$((HF_TOKEN))\n", true),
    ] {
        let folder = folder_with(&format!("{SOUND}{line}{copy}"));
        for arguments in [
            &["--structure-only", "run.env"][..],
            &["--dry-run", "run.env"],
            &["config", "show", "run.env"],
            &["config", "show", "--json", "run.env"],
            &["check", "run.env"],
        ] {
            let output = run(arguments, folder.path());
            let text = out(&output) + &err(&output);
            assert!(!text.contains(secret), "{arguments:?}: {text}");
            let told = !fails || arguments[0] != "--structure-only" || text.contains("<redacted>");
            assert!(told, "{arguments:?}: {text}");
        }
    }
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
    let json: serde_json::Value = serde_json::from_str(&out(&json)).unwrap();
    let name = &json["EXP_NAME"];
    assert_eq!(
        (name["value"].as_str(), name["layer"].as_str()),
        (Some("e"), Some("config"))
    );
    assert_eq!(
        (name["file"].as_str(), name["line"].as_u64()),
        (Some("run.env"), Some(2))
    );
    assert!(json["VAL_N"]["file"].is_null());
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

#[test]
fn help_of_the_runtimes_script_is_its_usage_from_any_folder() {
    let run = |argument: &str| {
        let output = Command::new(repository().join("setup/runtimes.sh"))
            .arg(argument)
            .current_dir("/")
            .output()
            .expect("bash can be started");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (code(&output), text.into_owned())
    };
    let (code, text) = run("--help");
    assert!(
        code == 0 && text.contains("setup/runtimes.sh NAME@VERSION"),
        "{text}"
    );
    let (code, text) = run("--frobnicate");
    assert!(
        code == 1 && text.contains("`--frobnicate` is no option"),
        "{text}"
    );
}

#[test]
fn templates_say_nothing_about_an_agent_that_does_not_run() {
    let folder = tempfile::tempdir().unwrap();
    for scaffold in ["cc", "oc", "ohsdk", "oh", "terminus2"] {
        let config = format!("{SOUND}SCAFFOLD={scaffold}\nTEMPLATE_MODULES=( scaffold/{scaffold}.env )\n");
        fs::write(folder.path().join("run.env"), config).unwrap();
        let output = run(&["config", "show", "run.env"], folder.path());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(code(&output), 0, "{text}");
        for name in ["HARBOR_AGENT_VERSION", "HARBOR_AGENT_RUNTIME_IMAGE"] {
            let line = text.lines().find(|line| line.contains(name)).unwrap_or_default();
            assert!(!line.contains("scaffold/"), "{line}");
        }
    }
}

#[test]
fn structure_only_says_what_will_be_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.env"), SOUND).unwrap();
    let last = |set: &[&str]| {
        let set = set.iter().flat_map(|value| ["--set", value]);
        let arguments: Vec<&str> = ["--structure-only", "run.env"].into_iter().chain(set).collect();
        let output = run(&arguments, folder.path());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().last().unwrap_or_default().to_owned()
    };
    assert!(last(&[]).ends_with("the configuration holds together; nothing was launched."));
    let text = last(&["MODEL_ENGINE=megatron", "BACKEND=docker"]);
    assert!(
        text.contains("2 of its values are not in this version") && text.contains("refused"),
        "{text}"
    );
}
