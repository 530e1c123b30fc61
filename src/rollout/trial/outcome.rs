//! The outcome table: what an agent's end means.

use crate::base::{CapturedSession, DropReason, StopReason};
use crate::rollout::scaffold::AgentRun;

/// Why the agent stopped, or why the attempt does not count.
pub(super) fn judge(run: &AgentRun, capture: &CapturedSession) -> Result<StopReason, (DropReason, String)> {
    if let Some(failure) = &capture.engine_failure {
        return Err((DropReason::EngineFailed, failure.clone()));
    }
    let crashed = run.exit_code != Some(0);
    if run.timed_out {
        Ok(StopReason::Timeout)
    } else if capture.context_overflow {
        Ok(StopReason::Overlong)
    } else if capture.turn_limit_hit || run.turn_limit_reached {
        Ok(StopReason::MaxTurnsReached)
    } else if crashed && capture.turns == 0 {
        Err((
            DropReason::AgentSetupFailed,
            format!(
                "the agent ended with {} before any model call was answered{}",
                ending(run),
                said(run)
            ),
        ))
    } else if crashed {
        Ok(StopReason::AgentCrash)
    } else {
        Ok(StopReason::AgentCompleted)
    }
}

fn ending(run: &AgentRun) -> String {
    let how = run
        .exit_code
        .map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
    if run.oom_killed {
        format!("{how}, out of memory,")
    } else {
        how
    }
}

fn said(run: &AgentRun) -> String {
    let detail = run.detail.trim();
    if detail.is_empty() {
        String::new()
    } else {
        format!(": {detail}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_match_wins() {
        use StopReason::*;
        let run = |exit_code, timed_out| AgentRun {
            exit_code,
            timed_out,
            detail: "no route".to_owned(),
            ..AgentRun::default()
        };
        let session = |turns, context_overflow, turn_limit_hit| CapturedSession {
            turns,
            context_overflow,
            turn_limit_hit,
            ..CapturedSession::default()
        };
        for (exit, timed_out, turns, overflow, limit, expected) in [
            (Some(0), false, 3, false, false, AgentCompleted),
            (Some(0), false, 0, false, false, AgentCompleted),
            (Some(1), false, 3, false, false, AgentCrash),
            (None, false, 3, false, false, AgentCrash),
            (Some(1), false, 3, true, false, Overlong),
            (Some(1), false, 3, false, true, MaxTurnsReached),
            (Some(1), false, 3, true, true, Overlong),
            (None, true, 3, true, true, Timeout),
            (None, true, 0, false, false, Timeout),
        ] {
            assert_eq!(
                judge(&run(exit, timed_out), &session(turns, overflow, limit)),
                Ok(expected),
                "{exit:?} {timed_out} {turns} {overflow} {limit}"
            );
        }

        let (reason, detail) = judge(&run(Some(7), false), &session(0, false, false)).unwrap_err();
        assert_eq!(reason, DropReason::AgentSetupFailed);
        assert!(
            detail.contains("exit code 7") && detail.contains("no route"),
            "{detail}"
        );

        let lost = CapturedSession {
            engine_failure: Some("replica 1 is gone".to_owned()),
            ..session(5, true, true)
        };
        assert_eq!(
            judge(&run(Some(0), true), &lost),
            Err((DropReason::EngineFailed, "replica 1 is gone".to_owned()))
        );
    }
}
