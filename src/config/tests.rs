//! Tests of whole configurations: layers, origins, roots, and every way to get one wrong.

use super::{values::RunKind, *};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

pub(super) const SOUND: &str = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=models/m\nTRAIN_FILES=t.parquet\n";

/// A folder with files, and a request for one of them.
pub(super) struct Fixture {
    folder: TempDir,
    set: Vec<String>,
    environment: BTreeMap<String, String>,
    kind: RunKind,
    site: Option<PathBuf>,
}

impl Fixture {
    pub(super) fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Self {
            folder,
            set: Vec::new(),
            environment: BTreeMap::new(),
            kind: RunKind::Train,
            site: None,
        }
    }

    pub(super) fn set(mut self, text: &str) -> Self {
        self.set.push(text.to_owned());
        self
    }

    pub(super) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    pub(super) fn kind(mut self, kind: RunKind) -> Self {
        self.kind = kind;
        self
    }

    pub(super) fn site(mut self, path: &str) -> Self {
        self.site = Some(path.into());
        self
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }

    pub(super) fn load(&self, config: &str) -> Result<Loaded, ConfigError> {
        load(&LoadRequest {
            kind: self.kind,
            site: self.site.clone(),
            set: self.set.clone(),
            environment: self.environment.clone(),
            ..LoadRequest::isolated(config, self.root())
        })
    }

    pub(super) fn ok(&self, config: &str) -> Loaded {
        self.load(config).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn error(&self, config: &str) -> String {
        match self.load(config) {
            Ok(_) => panic!("{config} must be refused"),
            Err(error) => error.to_string(),
        }
    }
}

pub(super) fn run(text: &str) -> Fixture {
    Fixture::new(&[("configs/run.env", &format!("{SOUND}{text}"))])
}

pub(super) fn origin(loaded: &Loaded, name: &str) -> String {
    show::rows(loaded)
        .into_iter()
        .find(|row| row.name == name)
        .unwrap()
        .origin
}

#[test]
fn each_layer_wins_over_the_one_before() {
    let module = ": \"${TRAIN_BSZ:=11}\"\n: \"${N_RESP:=12}\"\n: \"${VAL_N:=13}\"\n: \"${SP_SIZE:=14}\"\n";
    let config = format!("{SOUND}N_RESP=21\nVAL_N=22\nSP_SIZE=23\nTEMPLATE_MODULES=( x/m.env )\n");
    let files = [
        ("configs/run.env", config.as_str()),
        ("configs/templates/x/m.env", module),
    ];
    let fixture = Fixture::new(&files)
        .env("LEGORL_SET_VAL_N", "31")
        .env("LEGORL_SET_SP_SIZE", "32")
        .set("SP_SIZE=41");
    let loaded = fixture.ok("configs/run.env");
    let s = &loaded.settings;
    assert_eq!(
        (
            s.batch.train_bsz,
            s.batch.n_resp,
            s.validation.n,
            s.topology.sp_size
        ),
        (11, 21, 31, 41)
    );
    assert_eq!(s.batch.ppo_epochs, 1, "the table's default");
    assert_eq!(origin(&loaded, "PPO_EPOCHS"), "default");
    assert_eq!(origin(&loaded, "TRAIN_BSZ"), "configs/templates/x/m.env:1:4");
    assert_eq!(origin(&loaded, "N_RESP"), "configs/run.env:5:1");
    assert_eq!(origin(&loaded, "VAL_N"), "environment LEGORL_SET_VAL_N");
    assert_eq!(origin(&loaded, "SP_SIZE"), "--set SP_SIZE");
}

#[test]
fn an_override_reaches_what_is_computed_from_it() {
    let fixture = run("TRAIN_BSZ=8\nTRAIN_MINI_BSZ=$((TRAIN_BSZ / 2))\n").set("TRAIN_BSZ=32");
    let settings = fixture.ok("configs/run.env").settings;
    assert_eq!(
        (settings.batch.train_bsz, settings.batch.train_mini_bsz),
        (32, 16)
    );
}

#[test]
fn computed_defaults_follow_their_sources_and_are_shown() {
    let loaded = run("MAX_PROMPT=100\nMAX_RESP=300\nSP_SIZE=2\nTRAINING_MODE=async\n").ok("configs/run.env");
    let s = &loaded.settings;
    assert_eq!(
        (
            s.engine.max_model_len,
            s.batch.max_token_len_per_gpu,
            s.rollout.staleness
        ),
        (400, 200, 1.0)
    );
    let row = show::rows(&loaded)
        .into_iter()
        .find(|row| row.name == "ROLLOUT_MAX_MODEL_LEN")
        .unwrap();
    assert_eq!(
        (row.value.as_str(), row.origin.as_str()),
        ("400", "default: MAX_PROMPT + MAX_RESP")
    );
}

#[test]
fn paths_count_from_the_repository_root() {
    let fixture = Fixture::new(&[
        (
            "repo/configs/deep/run.env",
            &format!("{SOUND}LOG_DIR=${{REPO_ROOT}}/l\nCKPTS_DIR=../c\n"),
        ),
        ("repo/configs/templates/mode/sync.env", ""),
    ]);
    let s = fixture.ok("repo/configs/deep/run.env").settings;
    let repo = fixture.root().join("repo");
    assert_eq!(s.run.repo_root, repo);
    assert_eq!(s.model.path, repo.join("models/m"));
    assert_eq!(s.paths.logs, repo.join("l"));
    assert_eq!(s.paths.run, repo.join("runs/p/e"));
    // The original keeps its templates in scripts/.
    let fixture = Fixture::new(&[
        ("scripts/train/configs/r.env", SOUND),
        ("scripts/templates/a.env", ""),
    ]);
    assert_eq!(
        fixture.ok("scripts/train/configs/r.env").settings.run.repo_root,
        fixture.root()
    );
    // Without templates: the parent of configs/, or the config's own folder.
    let fixture = run("");
    assert_eq!(
        fixture.ok("configs/run.env").settings.run.repo_root,
        fixture.root()
    );
    let fixture = Fixture::new(&[("my/run.env", SOUND)]);
    assert_eq!(
        fixture.ok("my/run.env").settings.run.repo_root,
        fixture.root().join("my")
    );
}

#[test]
fn the_ambient_environment_changes_nothing_and_is_reported() {
    let fixture = run("SERVED_MODEL_NAME=${MY_NAME:-fallback}\n")
        .env("NNODES", "4")
        .env("MY_NAME", "from-env")
        .env("BACKEND", "process");
    let loaded = fixture.ok("configs/run.env");
    assert_eq!(loaded.settings.topology.nnodes, 1);
    assert_eq!(
        loaded.settings.model.served_model_name, "from-env",
        "the file asked for it"
    );
    let ambient: Vec<&ConfigWarning> = loaded
        .warnings
        .iter()
        .filter(|w| w.kind == WarningKind::AmbientIgnored)
        .collect();
    assert_eq!(ambient.len(), 1, "BACKEND equals the configuration");
    assert!(ambient[0].text.contains("NNODES") && ambient[0].text.contains("LEGORL_SET_NNODES"));
    // A module's default is not taken from the environment either.
    let files = [
        (
            "configs/run.env",
            &*format!("{SOUND}TEMPLATE_MODULES=( m.env )\n"),
        ),
        ("configs/templates/m.env", ": \"${N_RESP:=3}\"\n"),
    ];
    assert_eq!(
        Fixture::new(&files)
            .env("N_RESP", "9")
            .ok("configs/run.env")
            .settings
            .batch
            .n_resp,
        3
    );
}

#[test]
fn unknown_and_ineffective_variables_are_told_apart() {
    let warnings = run("TRAIN_BZS=8\nVENV_PATH=/v\n").ok("configs/run.env").warnings;
    assert_eq!(warnings.len(), 2);
    assert_eq!(warnings[0].kind, WarningKind::UnknownVariable);
    assert_eq!(
        warnings[0].text,
        "configs/run.env:5:1: unknown variable TRAIN_BZS; did you mean TRAIN_BSZ?"
    );
    assert_eq!(warnings[1].kind, WarningKind::NoEffect);
    assert!(warnings[1]
        .text
        .contains("VENV_PATH has no effect. There is no Python"));
}

#[test]
fn a_default_that_was_used_before_it_changed_is_reported() {
    let config = format!("{SOUND}TRAIN_MINI_BSZ=$((TRAIN_BSZ / 2))\nTRAIN_BSZ=8\n");
    let warnings = Fixture::new(&[("run.env", &config)]).ok("run.env").warnings;
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].text.starts_with("run.env:6:1: TRAIN_BSZ becomes `8`"),
        "{}",
        warnings[0]
    );
    assert!(warnings[0].text.contains("`64` was used at run.env:5:"));
}

#[test]
fn wrong_values_are_all_named_with_their_places() {
    let text = run("TRAIN_BSZ=-3\nACTOR_LR=1e-6x\nBACKEND=proces\nUSE_KL_LOSS=maybe\nTOP_P=1.5\nVAL_N=1.5\n")
        .error("configs/run.env");
    assert!(text.starts_with("6 problems"), "{text}");
    for part in [
        "configs/run.env:5:1: TRAIN_BSZ must be a whole number from 1 to 65536, and is `-3`",
        "configs/run.env:6:1: ACTOR_LR must be a number from 0 to 1, and is `1e-6x`",
        "configs/run.env:7:1: BACKEND must be one of process, docker, k8s, apptainer, and is `proces`; did you mean `process`?",
        "USE_KL_LOSS must be True or False",
        "TOP_P must be a number from",
        "VAL_N must be a whole number",
    ] {
        assert!(text.contains(part), "`{part}` is missing in {text}");
    }
    let text = Fixture::new(&[("run.env", "PROJECT_NAME=p\nEXP_NAME=a/b\n")]).error("run.env");
    assert!(text.contains("MODEL_PATH has no value and is required"), "{text}");
    assert!(text.contains("EXP_NAME becomes a folder name"), "{text}");
    let text = run("").set("N_RESP=zero").error("configs/run.env");
    assert!(text.contains("--set N_RESP: N_RESP must be"), "{text}");
}

#[test]
fn modules_that_cannot_be_used_are_named() {
    let with = |modules: &str, files: &[(&str, &str)]| {
        let config = format!("{SOUND}TEMPLATE_MODULES=( {modules} )\n");
        let mut all = vec![
            ("configs/run.env", config.as_str()),
            ("configs/templates/m.env", ""),
        ];
        all.extend(files);
        Fixture::new(&all).error("configs/run.env")
    };
    let missing = with("mode/nope.env", &[]);
    assert!(
        missing.contains("run.env:5:20: template module `mode/nope.env` not found"),
        "{missing}"
    );
    assert!(missing.contains("configs/templates/mode/nope.env"), "{missing}");
    assert!(with("../run.env", &[]).contains("is the run config itself"));
    assert!(with("m.env ./m.env", &[]).contains("is named twice"));
    assert!(with(
        "n.env",
        &[("configs/templates/n.env", "TEMPLATE_MODULES=( m.env )")]
    )
    .contains("further modules"));
    let required = with(
        "k.env",
        &[(
            "configs/templates/k.env",
            "\n: \"${K8S_KUBECONFIG:?K8S_KUBECONFIG is required}\"",
        )],
    );
    assert!(
        required.contains("configs/templates/k.env:2:4: K8S_KUBECONFIG: K8S_KUBECONFIG is required"),
        "{required}"
    );
}

#[test]
fn files_that_are_no_configs_are_refused() {
    let fixture = run("");
    let text = fixture.error("configs/nope.env");
    assert!(
        text.contains("config not found: `configs/nope.env`") && text.contains("working directory"),
        "{text}"
    );
    let folder = Fixture::new(&[("d/x", "")]);
    assert!(
        folder.error("d").contains("cannot read"),
        "a folder is not a config"
    );
    let large = Fixture::new(&[("run.env", &"# filler\n".repeat(1_200_000))]);
    assert!(large.error("run.env").contains("Is this the right file?"));
    assert!(run("REPO_ROOT=/x\n")
        .error("configs/run.env")
        .contains("REPO_ROOT is set by legorl-rank"));
    assert!(run("")
        .set("NOVALUE")
        .error("configs/run.env")
        .contains("--set NAME=VALUE"));
    assert!(run("")
        .set("1X=2")
        .error("configs/run.env")
        .contains("not a variable name"));
}

#[test]
fn secrets_are_never_shown() {
    let loaded = run("WANDB_API_KEY=abc123secret\n").ok("configs/run.env");
    for text in [show::text(&loaded), show::json(&loaded)] {
        assert!(
            text.contains("WANDB_API_KEY") && !text.contains("abc123secret"),
            "{text}"
        );
    }
}

#[test]
fn shown_json_is_json() {
    let text = show::json(&run("").ok("configs/run.env"));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["EXP_NAME"]["value"], "e");
    assert_eq!(value["EXP_NAME"]["origin"], "configs/run.env:2:1");
}

#[test]
fn settings_travel_between_ranks() {
    let settings = run("").ok("configs/run.env").settings;
    let bytes = serde_json::to_vec(&settings).unwrap();
    assert_eq!(serde_json::from_slice::<Settings>(&bytes).unwrap(), settings);
}

#[test]
fn every_shipped_configuration_loads_without_a_warning() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut loaded = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "env") {
            let request = LoadRequest::isolated(&path, &folder);
            let result = load(&request).unwrap_or_else(|error| panic!("{error}"));
            assert!(
                result.warnings.is_empty(),
                "{}: {:?}",
                path.display(),
                result.warnings
            );
            loaded += 1;
        }
    }
    assert!(
        loaded >= 2,
        "the demo's configurations are missing in {}",
        folder.display()
    );
}
