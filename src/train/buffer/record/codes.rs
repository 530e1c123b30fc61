//! Numbers of the reasons for which trials stop and are dropped. A number is never given to another reason.

use crate::base::{DropReason, StopReason};

const STOP_CODES: [(StopReason, u32); 5] = [
    (StopReason::AgentCompleted, 1),
    (StopReason::MaxTurnsReached, 2),
    (StopReason::Timeout, 3),
    (StopReason::Overlong, 4),
    (StopReason::AgentCrash, 5),
];

pub(super) fn stop_code(stop: StopReason) -> u32 {
    match stop {
        StopReason::AgentCompleted => 1,
        StopReason::MaxTurnsReached => 2,
        StopReason::Timeout => 3,
        StopReason::Overlong => 4,
        StopReason::AgentCrash => 5,
    }
}

pub(super) fn stop_reason(code: u32) -> Result<StopReason, String> {
    STOP_CODES
        .iter()
        .find(|(_, c)| *c == code)
        .map(|(reason, _)| *reason)
        .ok_or_else(|| format!("stop reason {code} is unknown to this program"))
}

const DROP_CODES: [(DropReason, u32); 8] = [
    (DropReason::EnvSetupFailed, 1),
    (DropReason::AgentSetupFailed, 2),
    (DropReason::VerifierFailed, 3),
    (DropReason::VerifierTimeout, 4),
    (DropReason::EngineFailed, 5),
    (DropReason::LeaseLost, 6),
    (DropReason::Stale, 7),
    (DropReason::TooOld, 8),
];

pub(super) fn drop_code(reason: DropReason) -> u32 {
    match reason {
        DropReason::EnvSetupFailed => 1,
        DropReason::AgentSetupFailed => 2,
        DropReason::VerifierFailed => 3,
        DropReason::VerifierTimeout => 4,
        DropReason::EngineFailed => 5,
        DropReason::LeaseLost => 6,
        DropReason::Stale => 7,
        DropReason::TooOld => 8,
    }
}

pub(super) fn drop_reason(code: u32) -> Result<DropReason, String> {
    DROP_CODES
        .iter()
        .find(|(_, c)| *c == code)
        .map(|(reason, _)| *reason)
        .ok_or_else(|| format!("drop reason {code} is unknown to this program"))
}
