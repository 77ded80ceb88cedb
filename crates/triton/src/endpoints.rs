//! The endpoints that the server takes down before it has stopped.
//!
//! A server that stops waits for its HTTP connections, at most until its exit time-out passes. Then it closes the port
//! and destroys the endpoint, though responses of requests in flight still go there: the next one would end the server
//! with SIGSEGV. If that has used the time-out up, the process exits at once. Otherwise there were no HTTP connections
//! left, and the server still waits for other requests.
//!
//! ```text
//! SIGTERM --- waits for HTTP connections ---> port closed, endpoint destroyed -> exit (process_exit.rs)
//!                                             responses pause ------------------------> go on, if there was no exit
//! ```
//!
//! The server does not tell a backend that it stops. But the backend is in its process, and sees that a socket is not
//! listened on any more. A closed port of something else costs one pause.

use std::fs;
use std::os::fd::RawFd;
use std::sync::Once;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::process_exit;

/// Longer than a server takes from the closing of a port to its exit.
const PAUSE: Duration = Duration::from_secs(1);

/// The sockets that the process listens on.
static PORTS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// Says that the server has started its endpoints: a client's request has arrived. Only the first call counts.
pub fn endpoints_are_up() {
    static UP: Once = Once::new();
    UP.call_once(|| {
        // The endpoints have registered functions for the exit as well.
        process_exit::come_first();
        *PORTS.lock() = listening_sockets();
    });
}

/// Waits for a moment if a port has been closed since the last call. Before each call that leads to an endpoint.
pub(super) fn wait_if_closing() {
    let mut ports = PORTS.lock();
    let num_open = ports.len();
    ports.retain(|port| is_listening(*port));
    if ports.len() < num_open {
        // With the lock, which all other responses wait for.
        thread::sleep(PAUSE);
    }
}

/// One socket for each address that the process listens on.
fn listening_sockets() -> Vec<RawFd> {
    let Ok(files) = fs::read_dir("/proc/self/fd") else {
        return Vec::new();
    };
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    let mut sockets: Vec<_> = names
        .filter_map(|name| name.parse().ok())
        .filter(|file| is_listening(*file))
        .collect();
    sockets.sort_unstable();
    let mut addresses = Vec::new();
    sockets.retain(|socket| {
        let address = address(*socket);
        let is_new = !addresses.contains(&address);
        addresses.push(address);
        is_new
    });
    sockets
}

fn is_listening(file: RawFd) -> bool {
    let mut accepts: libc::c_int = 0;
    let mut len = size_of_val(&accepts) as libc::socklen_t;
    // SAFETY: the value has `len` bytes. A file that is closed, or no socket, gives an error.
    let status = unsafe {
        libc::getsockopt(
            file,
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut accepts).cast(),
            &raw mut len,
        )
    };
    status == 0 && accepts != 0
}

/// The address of a socket, as bytes.
fn address(socket: RawFd) -> Vec<u8> {
    const MAX_LEN: usize = size_of::<libc::sockaddr_storage>();
    let mut bytes = [0u8; MAX_LEN];
    let mut len = MAX_LEN as libc::socklen_t;
    // SAFETY: the buffer has `len` bytes, and sockaddr_storage holds any address; it is only read as bytes. An error
    // leaves zeros.
    unsafe { libc::getsockname(socket, bytes.as_mut_ptr().cast(), &raw mut len) };
    bytes[..MAX_LEN.min(len as usize)].to_vec()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn ports_are_found_once_and_seen_to_close() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let again = listener.try_clone().expect("a copy");
        let (first, second) = (listener.as_raw_fd(), again.as_raw_fd());
        let found = listening_sockets();
        assert!(found.contains(&first.min(second)) && !found.contains(&first.max(second)));
        assert!(is_listening(first));
        // Not closed: another test could get its number.
        // SAFETY: the socket is open.
        assert_eq!(unsafe { libc::shutdown(first, libc::SHUT_RDWR) }, 0);
        assert!(!is_listening(first) && !is_listening(second));
        let connected = fs::File::open("/dev/null").expect("a file");
        assert!(!is_listening(connected.as_raw_fd()));
    }
}
