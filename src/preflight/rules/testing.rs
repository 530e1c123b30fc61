//! Settings and facts of a sound run, for tests of rules to spoil in one point.

use crate::{
    config::{self, values::ToolCallParser, LoadRequest, Settings},
    plan::shape::tests::qwen3,
    preflight::facts::{Facts, FolderFacts, IndexFacts, Limit, ModelFacts, SharedMemory},
};

/// A sound configuration, with overrides; of two for one variable the later holds.
pub(crate) fn settings(set: &[&str]) -> Settings {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = folder.path().join("run.env");
    std::fs::write(
        &config,
        "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
         NGPUS_PER_NODE=1\nTRAIN_BSZ=8\nMAX_PROMPT=256\nMAX_RESP=512\n",
    )
    .expect("the config can be written");
    let name = |text: &str| text.split('=').next().unwrap_or_default().to_owned();
    let last = set.iter().enumerate().filter(|(at, text)| {
        let later = &set[at + 1..];
        !later.iter().any(|other| name(other) == name(text))
    });
    let request = LoadRequest {
        set: last.map(|(_, text)| (*text).to_owned()).collect(),
        ..LoadRequest::isolated(config, folder.path())
    };
    config::load(&request)
        .expect("the test's configuration is valid")
        .settings
}

/// Facts under which every rule is content: a dense Qwen3 with 16 heads and 8 key-value heads.
pub(crate) fn facts() -> Facts {
    let index = IndexFacts {
        rows: 100,
        sampled: 16,
        problems: Vec::new(),
        image: None,
    };
    Facts {
        model: Ok(ModelFacts {
            shape: qwen3(1024, 28, 16, 3072),
            network: Ok(()),
            weights: Some(Ok(())),
            tokenizer: Ok(151_669),
            markup: Ok(Some(ToolCallParser::Hermes)),
        }),
        train_index: Ok(index.clone()),
        val_index: Some(Ok(index)),
        inputs: Vec::new(),
        folders: vec![FolderFacts {
            variable: "CKPTS_DIR",
            path: "/ckpt/p/e".into(),
            named: "/ckpt".into(),
            writable: Ok(()),
            free_bytes: Some(1 << 40),
        }],
        held: Vec::new(),
        sandbox: Some(Ok("bubblewrap 0.8.0".into())),
        scaffold_runtime: None,
        proxy_port: None,
        address: Some([10, 0, 0, 7].into()),
        ephemeral_ports: Some((32768, 60999)),
        open_files: Limit {
            soft: 65536,
            hard: 65536,
        },
        locked_memory: Limit {
            soft: u64::MAX,
            hard: u64::MAX,
        },
        shared_memory: Some(SharedMemory {
            total: 64 << 30,
            free: 64 << 30,
        }),
        gpus: Vec::new(),
        memory_bytes: Some(1 << 40),
        slurm: None,
        kubernetes: None,
        docker: None,
        world_size: None,
    }
}
