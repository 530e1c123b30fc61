//! Tests that need nothing but this machine's CPU.

mod layers;
