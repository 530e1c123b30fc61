//! Tests that need nothing but this machine's CPU.

mod demo;
mod kills;
mod layers;
#[path = "../support/mod.rs"]
mod support;
