//! The template modules that are built into the program: those of `configs/templates/`.

macro_rules! templates {
    ($($name:literal)+) => {
        /// Name below `templates/`, and text.
        pub const TEMPLATES: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../configs/templates/", $name))),)+
        ];
    };
}

templates! {
    "algorithm/grpo.env"
    "algorithm/gspo.env"
    "algorithm/ppo.env"
    "algorithm/reinforce_plus_plus.env"
    "algorithm/rloo.env"
    "backend/apptainer.env"
    "backend/docker.env"
    "backend/k8s.env"
    "backend/process.env"
    "engine/fsdp.env"
    "engine/megatron.env"
    "engine/veomni.env"
    "eval/common.env"
    "eval/vllm.env"
    "harbor/common.env"
    "infer/common.env"
    "infer/vllm.env"
    "mode/async.env"
    "mode/sync.env"
    "runtime/process.env"
    "scaffold/cc.env"
    "scaffold/custom.env"
    "scaffold/mini.env"
    "scaffold/oc.env"
    "scaffold/oh.env"
    "scaffold/ohsdk.env"
    "scaffold/terminus2.env"
    "verl/async.env"
    "verl/common.env"
    "verl/fsdp.env"
    "verl/sync.env"
    "verl/veomni.env"
}

/// The module with this name.
pub(super) fn find(name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.trim_start_matches("./");
    TEMPLATES.iter().find(|(known, _)| *known == name).copied()
}

/// The modules of the same folder, or all folders.
pub(super) fn alike(name: &str) -> String {
    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let same: Vec<&str> = TEMPLATES
        .iter()
        .filter(|(known, _)| known.rsplit_once('/').is_some_and(|(f, _)| f == folder))
        .map(|(known, _)| *known)
        .collect();
    if !same.is_empty() {
        return same.join(", ");
    }
    let mut folders: Vec<&str> = TEMPLATES
        .iter()
        .filter_map(|(known, _)| known.split('/').next())
        .collect();
    folders.dedup();
    format!("{} have modules", folders.join("/, ") + "/")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    fn below(folder: &Path, root: &Path, out: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, root, out);
            } else {
                out.insert(path.strip_prefix(root).unwrap().display().to_string());
            }
        }
    }

    #[test]
    fn every_shipped_module_is_built_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/templates");
        let mut files = BTreeSet::new();
        below(&root, &root, &mut files);
        let built_in: BTreeSet<String> = super::TEMPLATES
            .iter()
            .map(|(name, _)| (*name).to_owned())
            .collect();
        assert_eq!(
            files, built_in,
            "list every file of configs/templates in builtin.rs"
        );
    }
}
