//! Where the run computes.

use crate::{
    config::{values::DeviceName, Settings},
    preflight::{ok, warn, Facts, Outcome, Rule, TRAINING},
};

pub(super) const RULE: Rule = Rule {
    id: "device",
    runs: TRAINING,
    what: "DEVICE names a device that the machine of the launch has.",
    why: "A run for GPUs that computes on cores takes days for what takes minutes.",
    evidence:
        "`auto` takes a GPU wherever the driver shows one, and refuses to start where libtorch cannot use it.",
    fix: "Ask Slurm for GPUs (`--gpus-per-node`), or set DEVICE=cpu.",
    check,
};

fn check(s: &Settings, facts: Option<&Facts>) -> Vec<Outcome> {
    let Some(facts) = facts.filter(|facts| facts.world_size.is_some()) else {
        return Vec::new();
    };
    let (name, gpus) = (s.model.device, facts.gpus.len());
    vec![match (name, gpus) {
        (DeviceName::Cpu, 0) => ok("DEVICE=cpu"),
        (DeviceName::Cpu, _) => warn(format!("DEVICE=cpu, and this machine has {gpus} GPUs")),
        (DeviceName::Auto, 0) => ok("DEVICE=auto: no GPU is visible here, so the run computes on the CPU"),
        (DeviceName::Cuda, 0) => {
            warn("DEVICE=cuda, and nvidia-smi shows no GPU here: the run will not start")
        }
        (DeviceName::Auto | DeviceName::Cuda, _) => ok(format!("DEVICE={name}: {gpus} visible here")),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::{
        rules::testing::{facts, settings},
        Verdict,
    };

    #[test]
    fn a_launch_for_gpus_without_any_is_noticed() {
        let launched = Facts {
            world_size: Some(1),
            gpus: Vec::new(),
            ..facts()
        };
        let verdict = |device: &str| check(&settings(&[device]), Some(&launched))[0].0;
        assert_eq!(verdict("DEVICE=cuda"), Verdict::Warn);
        assert_eq!(verdict("DEVICE=auto"), Verdict::Ok);
        assert_eq!(verdict("DEVICE=cpu"), Verdict::Ok);
        let elsewhere = Facts {
            world_size: None,
            ..launched
        };
        assert!(check(&settings(&["DEVICE=cuda"]), Some(&elsewhere)).is_empty());
    }
}
