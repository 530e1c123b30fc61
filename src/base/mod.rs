//! What every layer shares and nothing else: ids, tokens, trajectories, and the seam traits.
//!
//! `rollout`, `serve` and `train` never import each other. They meet at the traits of this module
//! and are put together in `rank::wiring` alone:
//!
//! | Trait | Implemented by | Called by |
//! |---|---|---|
//! | [`Engine`] | `serve::engine` | `serve::proxy`, `train::weights` (through [`WeightTarget`]) |
//! | [`WeightTarget`] | `serve::engine` | `train::weights` |
//! | [`SessionHost`] | `serve::proxy` | `rollout::trial` |
//! | [`TrialPlan`] | `train::buffer`, `rank` (validation) | `rollout::lease` |
//! | [`TrialSink`] | `train::buffer`, `rank` (validation) | `rollout::trial` |
//!
//! Invariant: this module knows no file format, no network and no tensor library.

pub mod engine;
pub mod error_text;
pub mod files;
pub mod ids;
pub mod order;
pub mod routing;
pub mod sampling;
pub mod secrets;
pub mod session;
pub mod trajectory;
pub mod trial;
pub mod weights;

pub use engine::{
    Engine, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest, RoutedExperts,
    SampledToken,
};
pub use error_text::error_chain;
pub use ids::{GroupId, PolicyVersion, ReplicaId, RequestId, SessionId};
pub use routing::{RoutingRun, RoutingShape, RoutingStore, SequenceRouting};
pub use sampling::SamplingParams;
pub use secrets::{is_secret, remember_secret, remembered_secrets};
pub use session::{
    BranchKind, CapturedBranch, CapturedSession, SessionEndpoint, SessionError, SessionHost, SessionLimits,
    SessionSpec,
};
pub use trajectory::{TokenSequence, Trajectory, TrialOutcome, TrialTiming};
pub use trial::{
    DropReason, Purpose, SinkError, StopReason, Submitted, TrialAssignment, TrialEnd, TrialKey, TrialPlan,
    TrialPlanStep, TrialSink,
};
pub use weights::{DType, WeightAck, WeightError, WeightTarget, WeightTensor, WeightUpdate};
