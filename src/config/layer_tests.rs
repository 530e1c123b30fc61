//! Tests of layers: site file, second names, modules that are built in, kinds of run, secrets.

use super::{
    tests::{origin, run, Fixture, SOUND},
    values::RunKind,
    *,
};

#[test]
fn a_site_file_lies_between_modules_and_run_config() {
    let config = format!("{SOUND}N_RESP=21\nVAL_N=${{SITE_TRIALS}}\nTEMPLATE_MODULES=( m.env )\n");
    let files = [
        ("configs/run.env", config.as_str()),
        (
            "configs/templates/m.env",
            ": \"${TRAIN_BSZ:=11}\"\n: \"${SP_SIZE:=12}\"\n",
        ),
        ("site.env", "export SITE_TRIALS=7\nTRAIN_BSZ=31\nN_RESP=32\n"),
    ];
    let without = Fixture::new(&files);
    assert!(
        without
            .error("configs/run.env")
            .contains("SITE_TRIALS is not set"),
        "a site file is never read unasked"
    );
    let flag = Fixture::new(&files).site("site.env");
    let variable = Fixture::new(&files).env("LEGORL_SITE", "site.env");
    for fixture in [flag, variable] {
        let loaded = fixture.ok("configs/run.env");
        let s = &loaded.settings;
        assert_eq!(
            (
                s.batch.train_bsz,
                s.batch.n_resp,
                s.topology.sp_size,
                s.validation.n
            ),
            (31, 21, 12, 7)
        );
        assert_eq!(origin(&loaded, "TRAIN_BSZ"), "site.env:2:1");
        assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    }
    let missing = Fixture::new(&files).site("nope.env").error("configs/run.env");
    assert!(
        missing.contains("site file") && missing.contains("named by --site"),
        "{missing}"
    );
    let missing = Fixture::new(&files)
        .env("LEGORL_SITE", "nope")
        .error("configs/run.env");
    assert!(
        missing.contains("named by LEGORL_SITE in the environment"),
        "{missing}"
    );
    let modules = [
        ("configs/run.env", SOUND),
        ("s.env", "TEMPLATE_MODULES=( m.env )"),
    ];
    let text = Fixture::new(&modules).site("s.env").error("configs/run.env");
    assert!(
        text.contains("s.env:1:1: a site file cannot name modules"),
        "{text}"
    );
}

#[test]
fn second_names_are_the_variable_itself() {
    let loaded = run(
        "HARBOR_LOG_DIR=/shared/l\nMAX_INPUT_TOKENS=100\nTRAIN_MINI_BSZ=$((ACTOR_PPO_MINI_BATCH_SIZE))\n",
    )
    .set("ACTOR_PPO_MINI_BATCH_SIZE=16")
    .ok("configs/run.env");
    let s = &loaded.settings;
    assert_eq!(s.paths.logs, std::path::Path::new("/shared/l"));
    assert_eq!((s.data.max_prompt_tokens, s.batch.train_mini_bsz), (100, 16));
    assert_eq!(origin(&loaded, "LOG_DIR"), "configs/run.env:5:1 (HARBOR_LOG_DIR)");
    // The run config wins over a module, whichever name either uses.
    let config = format!("{SOUND}TRAINER_TOTAL_EPOCHS=3\nTEMPLATE_MODULES=( m.env )\n");
    let files = [
        ("configs/run.env", config.as_str()),
        ("configs/templates/m.env", ": \"${TOTAL_EPOCHS:=9}\"\n"),
    ];
    assert_eq!(
        Fixture::new(&files)
            .ok("configs/run.env")
            .settings
            .schedule
            .total_epochs,
        3
    );
}

#[test]
fn a_command_of_the_sandbox_in_double_quotes_is_told_of_single_ones() {
    for line in [
        "SCAFFOLD=custom\nSCAFFOLD_COMMAND=\"bash $LEGORL_RUNTIME/agent.sh\"\n",
        "SCAFFOLD=custom\n: \"${SCAFFOLD_COMMAND:=bash $OPENAI_BASE_URL}\"\n",
    ] {
        let text = run(line).error("configs/run.env");
        assert!(
            text.contains("is not set") && text.contains("single quotes"),
            "{text}"
        );
    }
    let loaded =
        run("SCAFFOLD=custom\nSCAFFOLD_COMMAND='bash $LEGORL_RUNTIME/agent.sh'\n").ok("configs/run.env");
    let command = loaded.settings.agent.command;
    assert_eq!(command.as_deref(), Some("bash $LEGORL_RUNTIME/agent.sh"));
    let text = run("EXP_NAME=x-$LEGORL_RUNTIME\n").error("configs/run.env");
    assert!(!text.contains("single quotes"), "{text}");
}

#[test]
fn contradictions_are_errors_with_both_places() {
    let text = run("HARBOR_LOG_DIR=/a\nLOG_DIR=/b\n").error("configs/run.env");
    assert!(
        text.contains(
            "configs/run.env:6:1: LOG_DIR=`/b` contradicts HARBOR_LOG_DIR=`/a` at configs/run.env:5:1"
        ),
        "{text}"
    );
    assert!(run("HARBOR_LOG_DIR=/a\nLOG_DIR=/a\n")
        .load("configs/run.env")
        .is_ok());
    let text = run("").set("N_RESP=2").set("N_RESP=3").error("configs/run.env");
    assert!(
        text.contains("--set N_RESP: contradicts --set N_RESP (`2`)"),
        "{text}"
    );
    let text = run("")
        .env("LEGORL_SET_SAVE_FREQ", "2")
        .env("LEGORL_SET_TRAINER_SAVE_FREQ", "3")
        .error("configs/run.env");
    assert!(
        text.contains("contradicts environment LEGORL_SET_SAVE_FREQ"),
        "{text}"
    );
    // A module of one mode in a run of the other.
    let text = run("TEMPLATE_MODULES=( mode/async.env )\nTRAINING_MODE=sync\n").error("configs/run.env");
    assert!(
        text.contains("run.env:5:20: the module `mode/async.env` belongs to TRAINING_MODE=async"),
        "{text}"
    );
    assert!(
        text.contains("TRAINING_MODE is `sync` (configs/run.env:6:1)"),
        "{text}"
    );
    // Named alone, a module brings its own value.
    let loaded = run("TEMPLATE_MODULES=( mode/async.env )\n").ok("configs/run.env");
    assert_eq!(loaded.settings.run.training_mode, values::TrainingMode::Async);
    let warnings = run("N_RESP=2\nN_RESP=4\n").ok("configs/run.env").warnings;
    assert_eq!(warnings.len(), 1);
    assert_eq!(
        warnings[0].text,
        "configs/run.env:6:1: N_RESP is set again, to `4`; `2` at configs/run.env:5:1 is lost"
    );
}

#[test]
fn modules_come_from_the_flag_the_folder_or_the_program() {
    let config = format!("{SOUND}TEMPLATE_MODULES=( mode/sync.env )\n");
    let own = ": \"${N_RESP:=5}\"\n";
    let built_in = Fixture::new(&[("a/run.env", &config)]).ok("a/run.env");
    assert_eq!(origin(&built_in, "STALENESS"), "built-in/mode/sync.env:4:4");
    let files = [
        ("a/run.env", config.as_str()),
        ("a/templates/mode/sync.env", own),
        ("b/mode/sync.env", ": \"${N_RESP:=6}\"\n"),
    ];
    assert_eq!(Fixture::new(&files).ok("a/run.env").settings.batch.n_resp, 5);
    let fixture = Fixture::new(&files).env("LEGORL_TEMPLATES", "b");
    assert_eq!(fixture.ok("a/run.env").settings.batch.n_resp, 6);
    let text = Fixture::new(&files)
        .env("LEGORL_TEMPLATES", "a/run.env")
        .error("a/run.env");
    assert!(
        text.contains("folder of template modules") && text.contains("not a folder"),
        "{text}"
    );
    // The original's own modules hold commands; they are left alone, and that is said.
    let files = [
        ("scripts/train/run.env", config.as_str()),
        ("scripts/templates/verl/common.env", ": \"${X:=$(hostname)}\""),
        ("scripts/templates/mode/sync.env", ": \"${X:=$(hostname)}\""),
    ];
    let fixture = Fixture::new(&files);
    let loaded = fixture.ok("scripts/train/run.env");
    assert_eq!(loaded.settings.run.repo_root, fixture.root());
    assert_eq!(loaded.warnings.len(), 1);
    assert_eq!(loaded.warnings[0].kind, WarningKind::ForeignTemplates);
}

/// The shape of the original's configs: same constructs, same module names.
const LIKE_THE_ORIGINAL: &str = r#"# a run on a cluster
BACKEND=k8s            # pods
SCAFFOLD=ohsdk
TRAINING_MODE=async
MODEL_ENGINE=veomni
PROJECT_NAME=bug-fixing-3-nodes
EXP_NAME=long-$(date -u +%Y%m%d-%H%M%S)
VENV_PATH=${REPO_ROOT}/.venv
HARBOR_LOG_DIR=/shared/${PROJECT_NAME}/${EXP_NAME}/logs
WANDB_API_KEY="${WANDB_API_KEY:-}"
MODEL_PATH=/models/Some-35B-A3B
TOOL_CALL_PARSER=qwen3_coder
TRAIN_FILES=/data/train.parquet
VAL_FILES=/data/val.parquet
NNODES=3
N_NODES_TRAIN=2
N_NODES_ROLLOUT=1
K8S_KUBECONFIG=$HOME/.kube/config
TOTAL_EPOCHS=3
HARBOR_OPENSWE_IMAGE_REGISTRY=registry.example:5000
HARBOR_HOSTPATH_MOUNTS='[{"host_path":"/node/a","mount_path":"/opt/a","read_only":true}]'
HARBOR_NETADMIN_IMAGE="registry.example:5000/netadmin:1"
SP_SIZE=8
ENABLE_R3=True
AGENT_NUM_WORKERS=250
TEMPLATE_MODULES=(
  runtime/process.env
  "backend/${BACKEND}.env"
  harbor/common.env
  "scaffold/${SCAFFOLD}.env"
  verl/common.env
  "verl/${TRAINING_MODE}.env"
  "verl/${MODEL_ENGINE}.env"
)
"#;

fn like_the_original(text: &str) -> Fixture {
    Fixture::new(&[("scripts/x/run.env", text)])
        .env("HOME", "/home/u")
        .env("WANDB_API_KEY", "wandb-secret-1234")
}

#[test]
fn a_config_in_the_shape_of_the_original_loads_with_its_values() {
    let loaded = like_the_original(LIKE_THE_ORIGINAL).ok("scripts/x/run.env");
    let s = &loaded.settings;
    assert_eq!(s.run.exp_name, "long-19700101-000000");
    assert_eq!((s.batch.train_bsz, s.batch.n_resp, s.plan.gen_tp), (64, 8, 4));
    assert_eq!(s.window_tokens(), 200_000);
    assert_eq!(s.batch.max_token_len_per_gpu, 25_000);
    assert_eq!(
        s.kubernetes.kubeconfig.as_deref(),
        Some(std::path::Path::new("/home/u/.kube/config"))
    );
    assert_eq!(s.kubernetes.host_mounts.len(), 1);
    assert_eq!(s.plan.enable_r3, Some(true));
    let unavailable: Vec<&str> = s.unavailable.iter().map(|u| u.name.as_str()).collect();
    assert!(
        unavailable.contains(&"GEN_TP") && !unavailable.contains(&"ENABLE_R3"),
        "{unavailable:?}"
    );
    assert!(
        loaded.warnings.iter().all(|w| w.kind == WarningKind::NoEffect),
        "{:?}",
        loaded.warnings
    );
    for text in [show::text(&loaded), show::json(&loaded)] {
        assert!(!text.contains("wandb-secret"), "{text}");
    }
}

/// Every order of the modules gives the same settings.
#[test]
fn the_order_of_the_modules_does_not_matter() {
    let modules = [
        "runtime/process.env",
        "backend/k8s.env",
        "harbor/common.env",
        "scaffold/ohsdk.env",
        "verl/common.env",
        "verl/async.env",
        "verl/veomni.env",
    ];
    let (head, _) = LIKE_THE_ORIGINAL.split_once("TEMPLATE_MODULES").unwrap();
    let load = |order: &[&str]| {
        let text = format!("{head}TEMPLATE_MODULES=( {} )\n", order.join(" "));
        let mut settings = like_the_original(&text).ok("scripts/x/run.env").settings;
        // Each fixture has a folder of its own.
        settings.run.repo_root = Default::default();
        settings.run.config_path = Default::default();
        settings.paths.run = Default::default();
        settings.paths.trials = Default::default();
        settings.paths.checkpoints = Default::default();
        settings
    };
    let first = load(&modules);
    for turn in 1..modules.len() {
        let mut order = modules;
        order.rotate_left(turn);
        assert_eq!(load(&order), first, "{order:?}");
        order.reverse();
        assert_eq!(load(&order), first, "{order:?}");
    }
}

#[test]
fn each_kind_of_run_needs_its_own_variables() {
    let base = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\n";
    let eval = |text: &str| Fixture::new(&[("run.env", &format!("{base}{text}"))]).kind(RunKind::Eval);
    let modules = "TEMPLATE_MODULES=( eval/common.env eval/vllm.env harbor/common.env )\n";
    let loaded = eval(&format!("DATASET_PATH=d\nEVAL_TEMPERATURE=0.5\nMAX_INPUT_TOKENS=100\nMAX_OUTPUT_TOKENS=50\nPOD_PREFIX=q\n{modules}"))
        .ok("run.env");
    let s = &loaded.settings;
    assert_eq!(
        (s.sampling.temperature, s.window_tokens(), s.engine.max_model_len),
        (0.5, 150, 150)
    );
    assert_eq!(
        (s.rollout.n_concurrent, s.kubernetes.pod_name_prefix.as_str()),
        (16, "q-sx")
    );
    assert!(
        s.eval
            .as_ref()
            .unwrap()
            .dataset_path
            .as_ref()
            .unwrap()
            .ends_with("d")
            && s.infer.is_none()
    );
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    assert!(eval("")
        .error("run.env")
        .contains("an evaluation needs one of them"));
    assert!(eval("DATASET_PATH=d\nDATASET_NAME=n\n")
        .error("run.env")
        .contains("set one of them"));

    let infer = |text: &str| Fixture::new(&[("run.env", &format!("{base}{text}"))]).kind(RunKind::Infer);
    let text = infer("").error("run.env");
    for name in ["INDEX_FILE", "RESULTS_DIR", "OUTPUT_INDEX"] {
        assert!(
            text.contains(&format!("{name} has no value and is required")),
            "{text}"
        );
    }
    assert!(!text.contains("TRAIN_FILES"), "{text}");
    let loaded = infer(
        "INDEX_FILE=i\nRESULTS_DIR=r\nOUTPUT_INDEX=o\nTOOL_CALL_PARSER=hermes\nVLLM_MAX_MODEL_LEN=1000\n\
         MAX_RESPONSE_LEN=300\nTEMPLATE_MODULES=( infer/common.env infer/vllm.env )\n",
    )
    .ok("run.env");
    assert_eq!(loaded.settings.data.max_prompt_tokens, 700);
    assert_eq!(loaded.settings.infer.as_ref().unwrap().n_trials, 4);
    // A variable of another kind is no mistake, and no silence either.
    let warnings = run("INDEX_FILE=i\n").ok("configs/run.env").warnings;
    assert_eq!(
        warnings[0].text,
        "configs/run.env:5:1: INDEX_FILE has no effect in `train`; it is for `infer`"
    );
}

#[test]
fn names_of_ones_own_may_be_referred_to() {
    let loaded = run("MY_ROOT=/models\nMODEL_ROOT=/m\nSERVED_MODEL_NAME=${MY_ROOT}${MODEL_ROOT}\n")
        .ok("configs/run.env");
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let warnings = run("MY_ROOT=/models\nMODEL_ROOT=/m\n")
        .ok("configs/run.env")
        .warnings;
    assert_eq!(warnings.len(), 2);
    // A name that is nearly a known one is a mistake even if a line refers to it.
    let warnings = run("TRAIN_BZS=8\nN_RESP=$TRAIN_BZS\n")
        .ok("configs/run.env")
        .warnings;
    assert!(warnings[0].text.contains("did you mean TRAIN_BSZ?"));
}

#[test]
fn secrets_stay_out_of_messages_and_settings() {
    const SECRET: &str = "s3cr3t-value-99";
    let text = run("")
        .set(&format!("WANDB_API_KEY={SECRET}"))
        .error("configs/run.env");
    assert!(
        text.contains("LEGORL_SET_WANDB_API_KEY") && !text.contains(SECRET),
        "{text}"
    );
    for wrong in [
        format!("MY_TOKEN={SECRET}\nN_RESP=$((MY_TOKEN + 1))\n"),
        format!("MY_TOKEN={SECRET}\nX=${{Y:?no $MY_TOKEN}}\n"),
    ] {
        let text = run(&wrong).error("configs/run.env");
        assert!(!text.contains(SECRET), "{text}");
    }
    let config = format!(
        "WANDB_API_KEY={SECRET}\nWANDB_API_KEY={SECRET}-2\nCOPY=x-${{WANDB_API_KEY}}\nY=$COPY\nDOCKER_HOST=tcp://u:hunter2@h:1\n"
    );
    let loaded = run(&config)
        .env("LEGORL_SET_HF_TOKEN", SECRET)
        .ok("configs/run.env");
    let mut everything = show::text(&loaded) + &show::json(&loaded);
    for warning in &loaded.warnings {
        everything.push_str(&warning.text);
    }
    assert!(
        !everything.contains(SECRET) && !everything.contains("hunter2"),
        "{everything}"
    );
    // Settings are logged, sent between ranks and stored.
    let mut settings = loaded.settings.clone();
    settings.docker.host = None;
    assert!(!serde_json::to_string(&settings).unwrap().contains(SECRET));
    assert!(variables::all().all(|variable| !variables::is_secret(variable.name)));
}

#[test]
fn files_that_never_end_and_files_of_another_kind_are_refused() {
    let fixture = run("");
    for path in ["/dev/zero", "/dev/null"] {
        assert!(fixture.error(path).contains("not a regular file"), "{path}");
    }
    assert!(fixture
        .error("configs/rnu.env")
        .contains("did you mean configs/run.env?"));
    let many: String = (0..5000).map(|i| format!("NO_SUCH_NAME_{i}=1\n")).collect();
    let warnings = run(&many).ok("configs/run.env").warnings;
    assert_eq!(warnings.len(), 101);
    assert!(warnings[100].text.contains("4900 further"), "{}", warnings[100]);
}

#[test]
fn values_that_belong_elsewhere_are_explained() {
    let text = run("MAX_PROMPT=30,000\nTRAIN_BSZ=\"8 \"\n").error("configs/run.env");
    assert!(
        text.contains("`30,000`; write digits alone") && text.contains("`8 `\n") | text.ends_with("`8 `"),
        "{text}"
    );
    let text = run("TEMPLATE_MODULES=( mode/sync.env, engine/fsdp.env )\n").error("configs/run.env");
    assert!(text.contains("blanks separate"), "{text}");
    let text = run("ADV_ESTIMATOR=gspo\nSCAFFOLD=claude-code\nHARBOR_HOSTPATH_MOUNTS='{}'\nHARBOR_HOSTPATH_NODE_REWRITE=a\nDOCKER_HOST=ssh://h\n")
        .error("configs/run.env");
    for part in [
        "POLICY_LOSS_MODE=gspo",
        "Claude Code is `cc`",
        "JSON list",
        "FROM:TO",
        "unix:// or tcp://",
    ] {
        assert!(text.contains(part), "`{part}` is missing in {text}");
    }
}
