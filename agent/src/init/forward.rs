//! Loopback port to the proxy's unix socket: the only way out of the sandbox.

use legorl_agent::protocol::{PROXY_PORT, PROXY_SOCKET_PATH};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Connections at once; more are closed at once, which a client sees as a refusal.
const MAX_CONNECTIONS: usize = 128;
/// Stack of a copying thread; it holds one buffer of [`BUFFER`].
const STACK: usize = 64 << 10;
const BUFFER: usize = 16 << 10;

/// Listens on the loopback device.
pub fn start() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PROXY_PORT))?;
    let open = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || loop {
        match listener.accept() {
            Ok((client, _)) if open.load(Ordering::Relaxed) < MAX_CONNECTIONS => {
                open.fetch_add(1, Ordering::Relaxed);
                let in_use = Slot(open.clone());
                // A connection that cannot be served is dropped: the client sees it closed.
                let _ = serve(client, in_use);
            }
            Ok(_) => {}
            // Out of descriptors or memory: the next connection may be luckier.
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    });
    Ok(())
}

struct Slot(Arc<AtomicUsize>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(client: TcpStream, slot: Slot) -> io::Result<()> {
    client.set_nodelay(true)?;
    let proxy = UnixStream::connect(PROXY_SOCKET_PATH)?;
    let (client_in, proxy_out) = (client.try_clone()?, proxy.try_clone()?);
    let builder = || thread::Builder::new().stack_size(STACK);
    builder().spawn(move || {
        copy(client_in, &proxy_out);
        // The proxy may still answer; it only learns that no more will come.
        let _ = proxy_out.shutdown(Shutdown::Write);
    })?;
    builder().spawn(move || {
        let _slot = slot;
        copy(proxy, &client);
        // The proxy has closed. Ending both ways also ends the other thread.
        let _ = client.shutdown(Shutdown::Both);
    })?;
    Ok(())
}

/// Copies until either side ends; both are closed by the caller.
fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = [0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                if to.write_all(&buffer[..n]).is_err() {
                    return;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
