//! The Slurm job that this process is in.

use super::program::{ask, DEADLINE};
use std::time::Duration;

/// Facts about the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmFacts {
    /// Job number.
    pub job: String,
    /// Time until Slurm ends the job; `None` without a limit or an answer.
    pub time_left: Option<Duration>,
    /// How long before that the batch shell gets its signal; `None` where the script asks for none.
    pub signal_lead: Option<Duration>,
}

/// Asks Slurm; `None` outside of a job.
pub fn probe() -> Option<SlurmFacts> {
    let job = std::env::var("SLURM_JOB_ID").ok().filter(|job| !job.is_empty())?;
    let left = ask("squeue", &["--noheader", "--jobs", &job, "--format=%L"], DEADLINE).ok();
    let script = ask("scontrol", &["write", "batch_script", &job, "-"], DEADLINE).ok();
    Some(SlurmFacts {
        time_left: left.as_deref().and_then(parse_time_left),
        signal_lead: script.as_deref().and_then(parse_signal_lead),
        job,
    })
}

/// `[days-][hours:]minutes:seconds`; anything else (`UNLIMITED`, `INVALID`) is no limit.
fn parse_time_left(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (days, clock) = match text.split_once('-') {
        Some((days, clock)) => (days.parse::<u64>().ok()?, clock),
        None => (0, text),
    };
    let mut seconds = 0;
    for part in clock.split(':') {
        seconds = seconds * 60 + part.parse::<u64>().ok()?;
    }
    Some(Duration::from_secs(days * 86_400 + seconds))
}

/// The lead of `#SBATCH --signal=B:USR1@120`.
fn parse_signal_lead(script: &str) -> Option<Duration> {
    script
        .lines()
        .filter(|line| line.starts_with("#SBATCH"))
        .find_map(|line| line.split_once("--signal"))
        .and_then(|(_, value)| {
            let lead = value.split_once('@').map_or("60", |(_, lead)| lead);
            let digits: String = lead.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok().map(Duration::from_secs)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_leads_are_read_as_slurm_writes_them() {
        let seconds = |text| parse_time_left(text).map(|d| d.as_secs());
        assert_eq!(seconds("1:59:58"), Some(7198));
        assert_eq!(seconds("2-00:00:01"), Some(172_801));
        assert_eq!(seconds("4:05"), Some(245));
        assert_eq!((seconds("UNLIMITED"), seconds("")), (None, None));
        let lead = |script| parse_signal_lead(script).map(|d| d.as_secs());
        assert_eq!(lead("#!/bin/bash\n#SBATCH --signal=B:USR1@120\n"), Some(120));
        assert_eq!(lead("#SBATCH --signal=USR1\n"), Some(60), "Slurm's own default");
        assert_eq!(lead("# --signal=B:USR1@120\n"), None);
    }
}
