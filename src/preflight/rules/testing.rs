//! Settings and facts of a sound run, for tests of rules to spoil in one point.

use crate::{
    config::{self, values::ToolCallParser, LoadRequest, Settings},
    preflight::facts::{Facts, FolderFacts, IndexFacts, ModelFacts},
};

/// A sound configuration, with overrides.
pub(crate) fn settings(set: &[&str]) -> Settings {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = folder.path().join("run.env");
    std::fs::write(
        &config,
        "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\nVAL_FILES=v.parquet\n\
         NGPUS_PER_NODE=1\nTRAIN_BSZ=8\nMAX_PROMPT=256\nMAX_RESP=512\n",
    )
    .expect("the config can be written");
    let request = LoadRequest {
        set: set.iter().map(|s| (*s).to_owned()).collect(),
        ..LoadRequest::isolated(config, folder.path())
    };
    config::load(&request)
        .expect("the test's configuration is valid")
        .settings
}

/// Facts under which every rule is content.
pub(crate) fn facts() -> Facts {
    let index = IndexFacts {
        rows: 100,
        sampled: 16,
        problems: Vec::new(),
    };
    Facts {
        model: Ok(ModelFacts {
            model_type: "qwen3".into(),
            max_position_embeddings: 1024,
            num_parameters: 1_500_000,
            weights: Ok(()),
            missing: Vec::new(),
            markup: Ok(Some(ToolCallParser::Hermes)),
        }),
        train_index: Ok(index.clone()),
        val_index: Some(Ok(index)),
        folders: vec![FolderFacts {
            variable: "CKPTS_DIR",
            path: "/ckpt".into(),
            writable: Ok(()),
            free_bytes: Some(1 << 40),
        }],
        sandbox: Some(Ok("bubblewrap 0.8.0".into())),
        proxy_port: None,
        open_files: (65536, 65536),
        world_size: None,
    }
}
