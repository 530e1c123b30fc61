//! Runtimes with a Python of their own, where a sandbox has nothing but a shell.

use super::bench::installed;
use crate::support::long;
use legorl::rollout::{
    sandbox::{ExecSpec, ProcessBackend, ProcessBackendConfig, SandboxBackend, SandboxSpec},
    scaffold::{oh, ohsdk, terminus2, PythonScaffold, RuntimeConfig, Scaffold},
};
use std::{os::unix::fs::symlink, time::Duration};

/// Modules that need the tree's own libraries, a child Python, a child of the sandbox, and no variable that
/// would lead that to the tree's libraries.
const PROGRAM: &str = r#"
import ssl, sqlite3, lzma, bz2, ctypes, readline, hashlib, zoneinfo, asyncio, subprocess, sys, os
assert sys.executable.startswith("/opt/legorl/runtimes/"), sys.executable
child = subprocess.run([sys.executable, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True)
assert child.stdout.strip() == sys.executable, child
print(subprocess.run(["/bin/sh", "-c", "echo shell ${LD_LIBRARY_PATH-none}"], capture_output=True, text=True, check=True).stdout)
assert all(path.startswith(sys.prefix) for path in sys.path if path), sys.path
"#;

#[test]
fn a_python_runtime_runs_in_a_root_that_holds_only_a_shell() {
    let agents = [
        (ohsdk::AGENT, "openhands.tools.preset.default"),
        (oh::AGENT, "openhands.app_server.config"),
        (terminus2::AGENT, "harbor.agents.terminus_2"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    for folder in ["bin", "tmp"] {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| std::path::Path::new(path).exists())
        .expect("install busybox-static");
    std::fs::copy(busybox, root.join("bin/busybox")).unwrap();
    symlink("busybox", root.join("bin/sh")).unwrap();
    let backend = ProcessBackend::new(ProcessBackendConfig {
        state_dir: dir.path().join("sandboxes"),
        rootfs: Some(root),
        helper: None,
        owner: "test".into(),
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (agent, module) in agents {
        let scaffold = PythonScaffold::new(agent, RuntimeConfig::default());
        if !installed(&scaffold, long()) {
            continue;
        }
        let mut spec = SandboxSpec::new(scaffold.name());
        spec.mounts = scaffold.mounts().unwrap();
        let tree = spec.mounts[0].inside.clone();
        runtime.block_on(async {
            let sandbox = backend.start(spec).await.unwrap();
            let exec = |argv: Vec<String>| {
                let mut exec = ExecSpec::new(argv);
                exec.timeout = Some(Duration::from_secs(180));
                exec.env
                    .insert("LITELLM_LOCAL_MODEL_COST_MAP".into(), "True".into());
                sandbox.exec(exec)
            };
            let python = format!("{tree}/bin/python3");
            let said = exec(vec![python.clone(), "-c".into(), PROGRAM.into()]).await.unwrap();
            assert!(said.success() && said.tail.contains("shell none"), "{}: {said:?}", scaffold.name());
            let agent = exec(vec![python, "-c".into(), format!("import {module}")]).await.unwrap();
            assert!(agent.success(), "{}: {agent:?}", scaffold.name());
            let write = exec(vec!["/bin/sh".into(), "-c".into(), format!("echo x > {tree}/bin/x")]).await.unwrap();
            assert!(!write.success(), "{}: the tree can be written", scaffold.name());
            if scaffold.name() == "terminus2" {
                let tmux = format!(
                    "PATH={tree}/tools:/bin:{tree}/fallback TERM=xterm TERMINFO_DIRS={tree}/share/terminfo; export PATH TERM TERMINFO_DIRS; \
                     tmux new-session -d -s one 'bash --norc' && tmux send-keys -t one 'echo $((6*7)) ${{LOCPATH-none}}' Enter; \
                     busybox sleep 2; tmux capture-pane -p -t one; tmux kill-server"
                );
                let said = exec(vec!["/bin/sh".into(), "-c".into(), tmux]).await.unwrap();
                assert!(said.tail.contains("42 none"), "{said:?}");
            }
            sandbox.delete().await.unwrap();
        });
    }
}
