#!/bin/bash
# Make a Debian or Ubuntu machine ready for testbed: provision.sh CHECKOUT USER [PIP_TORCH], as root. Running it again does no harm.
# Installs a kernel that has sch_netem where the running one has not; that one is in use after a restart, which it asks for.
set -euo pipefail
checkout=$1 user=$2 torch=${3:-}
export DEBIAN_FRONTEND=noninteractive
check=$checkout/vagrant/check_netem.sh # not beside $0: Vagrant runs a copy of this script that lies elsewhere

if ! command -v apt-get >/dev/null; then
  echo 'provision: this machine has no apt-get; take a box with Debian 13, Ubuntu 24.04 or later (TESTBED_BOX).' >&2
  exit 1
fi
apt-get -qq update
apt-get -qq install -y --no-install-recommends make iproute2 kmod util-linux python3 python3-venv
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "provision: testbed needs Python 3.11 or newer, and this box has $(python3 --version);" \
    'take a box with Debian 13, Ubuntu 24.04 or later (TESTBED_BOX).' >&2
  exit 1
fi

if ! "$check"; then
  if grep -q '^ID=ubuntu' /etc/os-release; then
    apt-get -qq install -y --no-install-recommends "linux-modules-extra-$(uname -r)"
  else # Debian's cloud kernels come without sch_netem, its standard kernel has it
    apt-get -qq install -y --no-install-recommends "linux-image-$(dpkg --print-architecture)"
    # The boot menu would go on preferring the cloud kernel; removing the running one is a question with the default no.
    echo 'linux-base linux-base/removing-running-kernel boolean false' | debconf-set-selections
    mapfile -t cloud < <(dpkg-query --show --showformat '${Package}\n' 'linux-image*-cloud-*' 2>/dev/null)
    [ ${#cloud[@]} = 0 ] || apt-get -qq remove -y "${cloud[@]}"
  fi
  if ! "$check"; then
    echo 'provision: a kernel with sch_netem is installed and runs after a restart:' \
      'vagrant reload --provision (elsewhere: restart, and run this script again)' >&2
    exit 1
  fi
fi
printf '%s\n' veth tun sch_netem >/etc/modules-load.d/testbed.conf

# PIP_TORCH: options for installing torch, such as the index of its CPU builds; without them x86-64 gets CUDA's gigabytes as well.
cd "$checkout"
sudo -u "$user" -H make .venv/.test PIP_TORCH="$torch"
ln -sfn "$checkout/.venv/bin/testbed" /usr/local/bin/testbed # /usr/local/bin is on sudo's PATH too

sudo -u "$user" -H sudo testbed doctor
