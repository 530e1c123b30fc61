//! Writes the demo's task folders: `cargo run --example make_demo_tasks -- [FOLDER]`.
//! The folder defaults to `jobs/demo/tasks`.

use legorl::train::supervised::task_folder::{demo_tasks, write_task};
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let root = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from("jobs/demo/tasks"), PathBuf::from);
    for (name, draft) in demo_tasks() {
        println!("{}", write_task(&root, &name, &draft)?.display());
    }
    Ok(())
}
