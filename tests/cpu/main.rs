//! Tests that need nothing but this machine's CPU.

mod demo;
mod kills;
mod layers;
#[cfg(feature = "mpi")]
mod mpi;
#[path = "../support/mod.rs"]
mod support;
