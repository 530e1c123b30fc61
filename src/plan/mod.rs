//! Capacity: what a configuration needs, computed from it and from the checkpoint's config.json.
//!
//! ```text
//! shape    config.json of any family -> sizes and parameter counts
//! memory   sizes and a parallel plan -> bytes per GPU of trainer and engine, by part
//! layout   settings -> the parallel plan that `memory` is asked about
//! ```
//!
//! Every formula is a count of tensors; none holds a number that was adjusted to a measurement.
//! Measurements are in the tests of [`memory`], which fail when an estimate is off by more than 15%.

pub mod layout;
pub mod memory;
pub mod shape;
