//! Tests that need nothing but this machine's CPU.

mod layers;
#[cfg(feature = "mpi")]
mod mpi;
