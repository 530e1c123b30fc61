//! Ids as types, so that a group is never mistaken for a replica.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_id!(
    /// One prompt with its `N_RESP` samples. Training groups are numbered in the order of the task
    /// cursor, so the number alone says which task row it is.
    GroupId,
    u64
);
number_id!(
    /// One generation request to an engine, unique within a run attempt.
    RequestId,
    u64
);
number_id!(
    /// One engine replica.
    ReplicaId,
    u32
);
number_id!(
    /// Number of optimizer steps that the weights have seen. Version 0 is the starting checkpoint.
    PolicyVersion,
    u32
);

/// One captured conversation: the path segment in `/sess/{id}/v1`. It carries no secret.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(pub std::sync::Arc<str>);

impl SessionId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for SessionId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
