//! Tests that need nothing but this machine's CPU.

mod agents;
mod demo;
mod families;
mod kills;
mod layers;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "mpi")]
mod ranks;
mod slow_trial;
#[path = "../support/mod.rs"]
mod support;
