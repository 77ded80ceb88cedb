//! A connection between the processes of rank 0 and of another rank: messages, and the shared memory.
//!
//! The other process has its end as its standard input. When either process ends, the other one reads the end of the
//! connection, whatever it does at that moment.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::super::channel::Channel;

/// The most bytes of a message: beyond the largest step.
const MAX_LEN: usize = 1 << 28;

/// One end of a connection.
pub struct Link(UnixStream);

impl Link {
    /// Both ends of a new connection. Neither is inherited by processes that are started later.
    ///
    /// # Errors
    ///
    /// The system refuses it.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Self(ours), Self(theirs)))
    }

    /// The end that this process was started with as its standard input.
    ///
    /// # Errors
    ///
    /// The standard input is something else.
    pub fn of_standard_input() -> io::Result<Self> {
        let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Anything but a socket has no address.
        stream.local_addr()?;
        Ok(Self(stream))
    }

    /// A second handle of this end.
    ///
    /// # Errors
    ///
    /// The system refuses it.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Sends a file, which the other process has then, too.
    ///
    /// # Errors
    ///
    /// The other process has ended, or does not read it in time.
    pub fn send_file(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let mut byte = [0_u8];
        let mut data = one_byte(&mut byte);
        let mut space = Space {
            head: libc::cmsghdr {
                cmsg_len: DESCRIPTOR_END,
                cmsg_level: libc::SOL_SOCKET,
                cmsg_type: libc::SCM_RIGHTS,
            },
            descriptor: file.as_raw_fd(),
            padding: 0,
        };
        // SAFETY: all zeros is a message without anything.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut data;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut space).cast();
        message.msg_controllen = size_of::<Space>();
        // SAFETY: the message, its byte and its space live until the call returns.
        let sent =
            unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        match sent {
            1 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The next file that the other process sends.
    ///
    /// # Errors
    ///
    /// It sends something else, or nothing in time.
    pub fn receive_file(&mut self) -> io::Result<File> {
        let mut byte = [0_u8];
        let mut data = one_byte(&mut byte);
        let mut space = Space::default();
        // SAFETY: as in `send_file`.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut data;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut space).cast();
        message.msg_controllen = size_of::<Space>();
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: as in `send_file`.
        let received = unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, flags) };
        if received == -1 {
            return Err(io::Error::last_os_error());
        }
        let is_file = message.msg_controllen >= DESCRIPTOR_END
            && space.head.cmsg_level == libc::SOL_SOCKET
            && space.head.cmsg_type == libc::SCM_RIGHTS
            && space.head.cmsg_len == DESCRIPTOR_END;
        if !is_file {
            return Err(io::Error::new(ErrorKind::InvalidData, "no file was sent"));
        }
        // SAFETY: the system has opened the descriptor for this process, and nobody else has it.
        Ok(unsafe { File::from_raw_fd(space.descriptor) })
    }

    /// Waits until the other process has ended, or has closed its end.
    pub fn wait_for_end(&self) {
        let mut end = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        loop {
            // SAFETY: the one entry lives until the call returns.
            let num_ready = unsafe { libc::poll(&raw mut end, 1, -1) };
            if num_ready == 1 {
                return;
            }
            if io::Error::last_os_error().kind() != ErrorKind::Interrupted {
                return;
            }
        }
    }

    fn send_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            // SAFETY: the bytes live until the call returns. Without the flag, a server that has no handler would end
            // by SIGPIPE.
            let sent = unsafe {
                libc::send(
                    self.0.as_raw_fd(),
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    libc::MSG_NOSIGNAL,
                )
            };
            match usize::try_from(sent) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != ErrorKind::Interrupted {
                        return Err(in_words(error));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Channel for Link {
    fn set_time_limit(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(limit)?;
        self.0.set_write_timeout(limit)
    }

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > MAX_LEN {
            return Err(too_long(message.len()));
        }
        self.send_all(&(message.len() as u32).to_ne_bytes())?;
        self.send_all(message)
    }

    fn receive(&mut self, message: &mut Vec<u8>) -> io::Result<bool> {
        let mut len = [0; 4];
        loop {
            match self.0.read(&mut len[..1]) {
                Ok(0) => return Ok(false),
                Ok(_) => break self.0.read_exact(&mut len[1..])?,
                // A process that was stopped continues.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The other process has ended with messages that it had not read.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(in_words(error)),
            }
        }
        let len = u32::from_ne_bytes(len) as usize;
        if len > MAX_LEN {
            return Err(too_long(len));
        }
        message.resize(len, 0);
        self.0.read_exact(message).map_err(in_words)?;
        Ok(true)
    }
}

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.0.into()
    }
}

/// Has the system end this process when the thread that has started it ends, stopped or not; has it ignore the signals
/// by which a user ends a server and all that it has started; and closes all files but the standard ones, among which
/// may be the connections of a server's clients.
pub fn follow_parent() {
    // SAFETY: a call without pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: a call without pointers, before the process has a file of its own. What an older system lacks is only a
    // second line of defence.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
    leave_signals_to_rank_0();
}

/// Has this process ignore the signals by which a user ends a server and all that it has started, or all processes of a
/// world: it ends when rank 0 does, which may have requests in flight.
pub fn leave_signals_to_rank_0() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: a call without pointers to anything of this process.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// The space of a message in which one file is sent, as `CMSG_SPACE` has it on 64-bit systems.
#[repr(C)]
struct Space {
    head: libc::cmsghdr,
    descriptor: RawFd,
    padding: u32,
}

/// As `CMSG_LEN`.
const DESCRIPTOR_END: usize = size_of::<libc::cmsghdr>() + size_of::<RawFd>();

impl Default for Space {
    fn default() -> Self {
        Self {
            head: libc::cmsghdr {
                cmsg_len: 0,
                cmsg_level: 0,
                cmsg_type: 0,
            },
            descriptor: -1,
            padding: 0,
        }
    }
}

fn one_byte(byte: &mut [u8; 1]) -> libc::iovec {
    libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    }
}

/// What the system calls an operation that would block.
fn in_words(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => io::Error::new(ErrorKind::TimedOut, "no answer in time"),
        _ => error,
    }
}

fn too_long(len: usize) -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        format!("a message of {len} bytes is longer than {MAX_LEN}"),
    )
}
