//! `--dry-run`: every value, the lines that would start the run, and what each rank would do.

use crate::{
    config::{
        show,
        values::{DeviceName, RunKind, TrainingMode},
        Loaded, Settings,
    },
    rank::roles::RoleMap,
};
use std::fmt::Write as _;

/// Longest list of ranks.
const MAX_SHOWN_RANKS: u32 = 4096;

/// The resolved run.
pub fn text(loaded: &Loaded, arguments: &[String]) -> String {
    let modules = loaded.layered.modules.join(" ");
    let mut out = format!(
        "=== Final Configuration ===\n{}=== Template Modules ===\n{modules}\n",
        show::text(loaded)
    );
    out.push_str("=== Launch Command ===\n");
    out.push_str(&launch(loaded, arguments));
    out.push_str("=== Ranks ===\n");
    out.push_str(&ranks(loaded));
    out
}

/// Run config and flags as a shell reads them.
pub(super) fn words(s: &Settings, arguments: &[String]) -> String {
    let mut words = vec![s.run.config_path.display().to_string()];
    words.extend(arguments.iter().cloned());
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    words.join(" ")
}

/// The line for `sbatch`, and the step that it starts.
fn launch(loaded: &Loaded, arguments: &[String]) -> String {
    let s = &loaded.settings;
    let t = &s.topology;
    let words = words(s, arguments);
    if s.run.kind != RunKind::Train {
        return format!("legorl-rank {} {words}   (not in this version)\n", s.run.kind);
    }
    let per_node = t.ngpus_per_node;
    let script = match s.run.training_mode {
        TrainingMode::Sync => "slurm/train_sync.sbatch",
        TrainingMode::Async => "slurm/train_async.sbatch",
    };
    // A cluster whose nodes have no GPUs refuses the option.
    let gpus = match s.model.device {
        DeviceName::Cuda => format!(" --gpus-per-node={per_node}"),
        DeviceName::Cpu | DeviceName::Auto => String::new(),
    };
    let mut out = format!(
        "sbatch --nodes={} --ntasks-per-node={per_node}{gpus} {script} {words}\n",
        t.nnodes
    );
    if s.model.device == DeviceName::Auto {
        let _ = writeln!(
            out,
            "   (where nodes have GPUs, DEVICE=cuda adds --gpus-per-node={per_node}; docs/gpu.md says what the ranks need)"
        );
    }
    let _ = writeln!(
        out,
        "srun --nodes={} --ntasks={} --ntasks-per-node={per_node} --mpi=pmix --kill-on-bad-exit=1 legorl-rank train {words}",
        t.nnodes,
        s.world_size()
    );
    if s.world_size() == 1 {
        let _ = writeln!(out, "legorl-rank {words}   (one process, without Slurm)");
    } else {
        let _ = writeln!(
            out,
            "mpirun -n {} legorl-rank {words}   (without Slurm)",
            s.world_size()
        );
    }
    out
}

/// One line a rank. Slurm fills node after node.
fn ranks(loaded: &Loaded) -> String {
    let s = &loaded.settings;
    let per_node = s.topology.ngpus_per_node.max(1);
    let mut out = format!("{:>5}  {:>5}  {:>4}  role\n", "rank", "node", "gpu");
    if s.run.kind != RunKind::Train {
        let _ = writeln!(out, "{:>5}  {:>5}  {:>4}  {}", 0, 0, 0, s.run.kind);
        return out;
    }
    if s.world_size() > MAX_SHOWN_RANKS {
        let _ = writeln!(out, "{} ranks, too many to list", s.world_size());
        return out;
    }
    let roles = RoleMap::new(s.run.training_mode, s.world_size(), s.train_ranks());
    for line in roles.describe() {
        let (rank, role) = line
            .strip_prefix("rank ")
            .and_then(|rest| rest.split_once(": "))
            .unwrap_or(("?", &line));
        let at = rank.parse::<u32>().unwrap_or_default();
        let _ = writeln!(
            out,
            "{rank:>5}  {:>5}  {:>4}  {role}",
            at / per_node,
            at % per_node
        );
    }
    out.push_str("`gpu` counts the ranks of a node; where nodes have no GPUs it is a number only.\n");
    out
}

/// A word as a shell would need it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{load, LoadRequest};

    fn dry(config: &str, arguments: &[&str]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let base = "PROJECT_NAME=p\nEXP_NAME=e\nMODEL_PATH=m\nTRAIN_FILES=t.parquet\n";
        std::fs::write(folder.path().join("run.env"), format!("{base}{config}")).unwrap();
        let loaded = load(&LoadRequest::isolated("run.env", folder.path())).unwrap();
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        text(&loaded, &arguments)
    }

    #[test]
    fn every_rank_has_its_node_and_role() {
        let text = dry(
            "TRAINING_MODE=async\nNNODES=2\nN_NODES_TRAIN=1\nN_NODES_ROLLOUT=1\nNGPUS_PER_NODE=2\n",
            &[],
        );
        let ranks: Vec<&str> = text
            .lines()
            .skip_while(|line| *line != "=== Ranks ===")
            .skip(2)
            .take(4)
            .collect();
        assert_eq!(
            ranks,
            [
                "    0      0     0  head, trainer",
                "    1      0     1  trainer",
                "    2      1     0  engine replica",
                "    3      1     1  engine replica",
            ]
        );
        assert!(
            text.contains("sbatch --nodes=2 --ntasks-per-node=2 slurm/train_async.sbatch "),
            "{text}"
        );
        assert!(
            text.contains("srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --mpi=pmix"),
            "{text}"
        );
    }

    #[test]
    fn overrides_are_repeated_in_quotes_where_they_need_them() {
        let text = dry("NGPUS_PER_NODE=1\n", &["--set", "SERVED_MODEL_NAME=it's me"]);
        assert!(
            text.contains(r"run.env --set 'SERVED_MODEL_NAME=it'\''s me'"),
            "{text}"
        );
        assert!(text.contains("legorl-rank") && text.contains("(one process, without Slurm)"));
    }

    #[test]
    fn eight_gpus_of_a_node_are_eight_tasks_and_eight_gpus() {
        let text = dry("NNODES=2\nN_NODES_TRAIN=2\nNGPUS_PER_NODE=8\nDEVICE=cuda\n", &[]);
        assert!(
            text.contains("sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/train_sync.sbatch "),
            "{text}"
        );
        assert!(
            text.contains("srun --nodes=2 --ntasks=16 --ntasks-per-node=8"),
            "{text}"
        );
        let cores = dry("NGPUS_PER_NODE=8\nDEVICE=cpu\n", &[]);
        assert!(!cores.contains("--gpus-per-node"), "{cores}");
    }
}
